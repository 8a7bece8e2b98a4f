"""Triton kernels of Attention Residuals: one file an operation, its mathematics at the top of the file."""
