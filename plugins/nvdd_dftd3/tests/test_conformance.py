"""nvdd-dftd3 against the conformance kit."""

from __future__ import annotations

from nvdd_core.testing import AdapterSuite, DistributedSuite, ModelSuite, PluginSuite, SpecSuite
from nvdd_dftd3.conformance import Profile


class TestPlugin(Profile, PluginSuite): ...


class TestSpec(Profile, SpecSuite): ...


class TestAdapter(Profile, AdapterSuite): ...


class TestModel(Profile, ModelSuite): ...


class TestDistributed(Profile, DistributedSuite): ...
