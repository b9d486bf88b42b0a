"""From an nn.Module to a Graph: what can be split, what follows and reads its channels, and what that costs."""
