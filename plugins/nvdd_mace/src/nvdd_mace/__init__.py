"""MACE for nvdd. Import what you need from the modules; the model is `nvdd_mace.model:load`."""

__version__ = "0.1.0"
