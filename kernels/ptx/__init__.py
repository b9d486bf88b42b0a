"""A simulator of GPUs: it executes the PTX of our kernels with numpy, and finds races and other misuse of memory."""
