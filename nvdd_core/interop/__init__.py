"""nvdd inside other programs: `nvdd_core.interop.ase` is a calculator for ASE.

Layer: interop.
"""

from nvdd_core.interop.ase import DomainCalculator

__all__ = ["DomainCalculator"]
