"""A message-passing potential in pure PyTorch."""

__version__ = "0.1.0"
