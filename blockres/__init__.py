"""Attention Residuals (arXiv:2603.15031) for PyTorch."""

__version__ = "0.1.0"
