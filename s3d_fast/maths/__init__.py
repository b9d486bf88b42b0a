"""The definitions: activations, optimal splits, and every operation as plain PyTorch."""
