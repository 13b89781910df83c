"""DFT-D3 dispersion for nvdd. Import what you need from the modules; the model is `nvdd_dftd3.model:load`."""

__version__ = "0.1.0"
