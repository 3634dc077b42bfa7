"""Fused kernels for training transformers with PyTorch."""
