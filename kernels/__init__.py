"""Triton kernels, installed as s3d_fast.kernels and imported only when a GPU backend is asked for."""
