"""The model ``ewald`` against the conformance kit; with ``pme`` the kit's command runs (`make conform PLUGIN=pme`)."""

from __future__ import annotations

from nvdd_core.testing import DistributedSuite, ModelSuite
from nvdd_pme.conformance import EwaldProfile


class TestEwaldModel(EwaldProfile, ModelSuite): ...


class TestEwaldDistributed(EwaldProfile, DistributedSuite):
    ranks = (1, 3)
