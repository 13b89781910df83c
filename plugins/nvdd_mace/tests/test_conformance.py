"""nvdd-mace against the conformance kit."""

from __future__ import annotations

from nvdd_core.testing import AdapterSuite, DistributedSuite, ModelSuite, PluginSuite, SpecSuite
from nvdd_mace.conformance import Profile


class Mace(Profile):
    """Two ranks; the parity tests have three and four."""

    ranks = (1, 2)


class TestPlugin(Mace, PluginSuite): ...


class TestSpec(Mace, SpecSuite): ...


class TestAdapter(Mace, AdapterSuite): ...


class TestModel(Mace, ModelSuite): ...


class TestDistributed(Mace, DistributedSuite): ...
