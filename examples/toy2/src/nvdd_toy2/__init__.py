"""TOY2 as a plugin: two layers of message passing, written three ways."""

__version__ = "0.1.0"
