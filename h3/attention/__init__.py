"""Attention kernels behind one signature."""

from .dense import attention

__all__ = ["attention"]
