"""Triton kernels, installed as s3d_fast.kernels and imported at the first use of the Triton backend."""
