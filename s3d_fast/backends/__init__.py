"""The operations of a splitting step, the backends that carry them out, and the choice between them."""
