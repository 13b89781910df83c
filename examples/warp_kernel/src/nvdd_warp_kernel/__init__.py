"""A potential with a Warp kernel behind an OpAdapter."""

__version__ = "0.1.0"
