"""Triton kernels for CUDA. Only `projections` can be imported without a GPU."""
