"""nvdd-pme against the conformance kit, both models."""

from __future__ import annotations

from nvdd_core.testing import AdapterSuite, DistributedSuite, ModelSuite, PluginSuite, SpecSuite
from nvdd_pme.conformance import EwaldProfile, Profile


class TestPlugin(Profile, PluginSuite): ...


class TestSpec(Profile, SpecSuite): ...


class TestAdapter(Profile, AdapterSuite): ...


class TestModel(Profile, ModelSuite): ...


class TestDistributed(Profile, DistributedSuite):
    ranks = (1, 2, 4)


class TestEwaldModel(EwaldProfile, ModelSuite): ...


class TestEwaldDistributed(EwaldProfile, DistributedSuite):
    ranks = (1, 3)
