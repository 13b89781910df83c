"""Electrostatics of point charges for nvdd. Import what you need from the modules; loaders are in `nvdd_pme.model`."""

__version__ = "0.1.0"
