"""nvdd-lj against the conformance kit."""

from __future__ import annotations

from typing import ClassVar

from nvdd_core.testing import AdapterSuite, Conformance, DistributedSuite, ModelSuite, PluginSuite, SpecSuite


class Lj(Conformance):
    """Two species; shifted, so that the force is continuous at the cutoff."""

    plugin = "lj"
    options: ClassVar = {"shift": "force"}
    symbol = ("Ar", "Kr")


class TestPlugin(Lj, PluginSuite): ...


class TestSpec(Lj, SpecSuite): ...


class TestAdapter(Lj, AdapterSuite): ...


class TestModel(Lj, ModelSuite): ...


class TestDistributed(Lj, DistributedSuite): ...
