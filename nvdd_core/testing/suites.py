"""The suites: plain classes of tests that pytest collects when an author derives a ``Test...`` class from them.

Key objects: `PluginSuite`, `SpecSuite`, `AdapterSuite`, `ModelSuite`, `DistributedSuite`. Invariant: a test only
chooses structures and calls a function that can be called without the suite, too. Layer: testing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nvdd_core.plugins import AdapterKind, PluginStatus, default_manager
from nvdd_core.runtime.model_adapters import root_module
from nvdd_core.spec import SpecData
from nvdd_core.testing import (
    adapter_checks as adapter,
    distributed_checks as distributed,
    model_checks as model,
    plugin_checks as plugin,
    spec_checks as spec,
    symmetry_checks as symmetry,
)
from nvdd_core.testing.base import Conformance
from nvdd_core.testing.capabilities import Reduced
from nvdd_core.testing.failures import ConformanceError, NotApplicable, check
from nvdd_core.testing.structures import SPACINGS_IN_CUTOFF, chain
from nvdd_core.testing.tolerances import SINGLE, SLOPE, TIGHT


class PluginSuite(Conformance):
    """The package: entry point, light module, names, targets, metadata."""

    @check
    def test_entry_point_is_unique(self) -> None:
        """One installed distribution provides the plugin."""
        plugin.assert_entry_point_is_unique(self._plugin())

    @check
    def test_listing_is_light(self) -> None:
        """It can be listed where torch, numpy and ase can't be imported."""
        plugin.assert_listing_is_light(self._plugin())

    @check
    def test_names_are_valid(self) -> None:
        """Its rows are well formed and no other plugin uses its models' names."""
        plugin.assert_names_are_valid(self._plugin())

    @check
    def test_refs_resolve(self) -> None:
        """Everything declared can be imported and is what it is declared as."""
        plugin.assert_refs_resolve(self._plugin())

    @check
    def test_requirement_is_bounded(self) -> None:
        """It requires nvdd-core with an upper bound."""
        plugin.assert_requirement_is_bounded(self._plugin())

    @check
    def test_package_is_typed(self) -> None:
        """It ships py.typed."""
        plugin.assert_package_is_typed(self._plugin())

    @check
    def test_listing_row_fits_schema(self) -> None:
        """Its row in JSON has the keys and types of schema 1."""
        plugin.assert_listing_row_fits_schema(self._plugin())

    @check
    def test_hooks_are_idempotent(self) -> None:
        """Its hooks say the same when they are called again."""
        plugin.assert_hooks_are_idempotent(self._plugin())

    def _plugin(self) -> str:
        if not self.plugin:
            raise ConformanceError("set the class attribute `plugin` to the name of the entry point")
        return self.plugin


class SpecSuite(Conformance):
    """Every declared spec, and the model's own under each strategy that it takes."""

    @check
    def test_spec_round_trip(self) -> None:
        """to_dict, JSON and files bring it back."""
        for each in self._specs():
            spec.assert_spec_round_trip(each)

    @check
    def test_spec_is_frozen(self) -> None:
        """It can't be changed and can be hashed."""
        for each in self._specs():
            spec.assert_spec_is_frozen(each)

    @check
    def test_spec_can_be_copied(self) -> None:
        """Pickle and deepcopy bring it back."""
        for each in self._specs():
            spec.assert_spec_can_be_copied(each)

    @check
    def test_spec_merge_is_lossless(self) -> None:
        """Merged onto a preset it keeps all that it names."""
        for each in self._specs():
            spec.assert_spec_merge_is_lossless(each)

    @check
    def test_spec_refuses_unknown_keys(self) -> None:
        """An unknown key or version is refused."""
        for each in self._specs():
            spec.assert_spec_refuses_unknown_keys(each)

    @check
    def test_specs_reach_workers(self) -> None:
        """A spawned process gets the same specs."""
        spec.assert_specs_reach_workers(self._specs())

    @check
    def test_spec_fits_strategy(self) -> None:
        """Asked for a strategy, the model gives a spec for it, or refuses."""
        if not self.subject.has_model:
            raise NotApplicable("there is no model")
        for kind in self.subject.strategies:
            found = self.subject.model.distribution_spec(kind).strategy
            if found is not kind:
                raise ConformanceError(
                    f"distribution_spec({kind.value!r}) returned a spec for '{found.value}'; return one for the "
                    "strategy asked for, or raise SpecError"
                )

    def _specs(self) -> list[Any]:
        found: list[Any] = []
        if self.plugin:
            manager = default_manager()
            for row in manager.plugin(self.plugin).specs:
                found.append(manager.resolve(row.decl.ref, self.plugin))
        if self.subject.has_model:
            found += [self.subject.model.distribution_spec(kind) for kind in self.subject.strategies]
        unique = [each for place, each in enumerate(found) if each not in found[:place]]
        for each in unique:
            if not isinstance(each, SpecData):
                raise ConformanceError(f"{each!r} is no spec")
        return unique


class AdapterSuite(Conformance):
    """Every adapter that the plugin declares or its model's specs name."""

    @check
    def test_restores(self) -> None:
        """Install changes something; restore brings back the very same objects."""
        for each in self._adapters():
            adapter.assert_restores(each, self._root(each))

    @check
    def test_restores_after_exception(self) -> None:
        """So it does when the code in between raises."""
        for each in self._adapters():
            adapter.assert_restores_after_exception(each, self._root(each))

    @check
    def test_nested_use_restores(self) -> None:
        """Nested use restores once, at the end."""
        for each in self._adapters():
            adapter.assert_nested_use_restores(each, self._root(each))

    @check
    def test_second_owner_refused(self) -> None:
        """A second owner is refused, with both names."""
        for each in self._adapters():
            adapter.assert_second_owner_refused(each, self._root(each))

    @check
    def test_adapter_round_trip(self) -> None:
        """A spec can carry it as JSON."""
        for each in self._adapters():
            adapter.assert_adapter_round_trip(each)

    @check
    def test_op_is_well_formed(self) -> None:
        """Operators pass torch.library.opcheck on the author's samples."""
        skipped: list[str] = []
        for each in self._adapters():
            try:
                adapter.assert_op_is_well_formed(each, self.op_samples)
            except NotApplicable as reason:
                skipped.append(str(reason))
        if skipped:
            raise NotApplicable("; ".join(dict.fromkeys(skipped)))

    def _adapters(self) -> Iterator[Any]:
        if not self.plugin:
            raise ConformanceError("set the class attribute `plugin`, whose adapters are checked")
        manager = default_manager()
        rows = manager.adapters(self.plugin)
        usable = [row.decl.ref for row in rows if row.status is PluginStatus.OK]
        found = [manager.resolve(ref, self.plugin) for ref in usable]
        if self.subject.has_model:
            specs = [self.subject.model.distribution_spec(kind) for kind in self.subject.strategies]
            found += [
                a for s in specs for a in (*s.distribution.custom_ops, *s.distribution.third_party_helpers)
            ]
        if not found:
            raise NotApplicable(rows[0].reason if rows else f"plugin '{self.plugin}' has no adapter")
        yield from dict.fromkeys(found)

    def _root(self, each: Any) -> Any:
        """The live model, for adapters of its submodules."""
        if each.kind != AdapterKind.MODULE:
            return None
        return root_module(self.subject.model)


class ModelSuite(Conformance):
    """The model in one process."""

    @check
    def test_forces_match_finite_differences(self) -> None:
        """Forces are minus the derivative of the energy."""
        self.need("differentiable")
        model.feel_forces("the structures", self.subject.model, self.main())
        for name, atoms in self.small():
            model.assert_forces_match_finite_differences(
                self.subject.model, atoms, self.tolerance(SLOPE), name
            )

    @check
    def test_stress_matches_finite_differences(self) -> None:
        """The stress is the derivative of the energy with respect to a strain, over the volume."""
        self._need_stress()
        self.need("differentiable")
        for name, atoms in self.small(periodic=True):
            model.assert_stress_matches_finite_differences(
                self.subject.model, atoms, self.tolerance(SLOPE), name
            )

    @check
    def test_row_order_is_free(self) -> None:
        """Reordered atoms give reordered results."""
        for name, atoms in self.small():
            symmetry.assert_row_order_is_free(self.subject.model, atoms, self.tolerance(TIGHT), name)

    @check
    def test_lattice_translation_of_atoms(self) -> None:
        """Atoms may be anywhere, not only in the first cell."""
        for name, atoms in self.small():
            if atoms.pbc.any():
                symmetry.assert_lattice_translation_of_atoms(
                    self.subject.model, atoms, self.tolerance(TIGHT), name
                )

    @check
    def test_rigid_translation(self) -> None:
        """Only differences of positions matter."""
        self.need("translation_invariant")
        for name, atoms in self.small():
            symmetry.assert_rigid_translation(self.subject.model, atoms, self.tolerance(TIGHT), name)

    @check
    def test_rotation(self) -> None:
        """A rotated structure has the same energy and rotated forces."""
        self.need("rotation_invariant")
        for name, atoms in self.small():
            symmetry.assert_rotation(self.subject.model, atoms, self.tolerance(TIGHT), name)

    @check
    def test_replica_doubles_energy(self) -> None:
        """A replica has twice the energy."""
        self.need("extensive")
        for name, atoms in self.small(periodic=True):
            symmetry.assert_replica_doubles_energy(self.subject.model, atoms, self.tolerance(TIGHT), name)

    @check
    def test_batch_equals_alone(self) -> None:
        """Systems evaluated together don't feel one another."""
        self.need("batch")
        symmetry.assert_batch_equals_alone(self.subject.model, dict(self.small()), self.tolerance(TIGHT))

    @check
    def test_isolated_atoms(self) -> None:
        """One atom, and atoms without neighbours, can be evaluated."""
        self.need("open_boundaries", "local")
        symmetry.assert_isolated_atoms(self.subject.model, self.main(), self.tolerance(TIGHT))

    @check
    def test_deterministic(self) -> None:
        """The same input gives the same bits."""
        self.need("deterministic")
        model.assert_deterministic(self.subject.source, self.main())

    @check
    def test_inputs_untouched(self) -> None:
        """An evaluation changes nothing that it was given."""
        for name, atoms in self.small():
            model.assert_inputs_untouched(self.subject.model, atoms, name)

    @check
    def test_results_do_not_alias(self) -> None:
        """Results are the caller's to keep."""
        model.assert_results_do_not_alias(self.subject.model, self.main())

    @check
    def test_global_state_kept(self) -> None:
        """Process-wide settings of torch and numpy are left alone."""
        float32 = not isinstance(self.capabilities.get("float32", True), Reduced)
        model.assert_global_state_kept(self.subject.source, self.main(), float32)

    @check
    def test_float32_close_to_float64(self) -> None:
        """Single precision gives nearly the same."""
        self.need("float32")
        for name, atoms in self.small():
            model.assert_float32_close_to_float64(self.subject.source, atoms, self.tolerance(SINGLE), name)

    @check
    def test_unknown_element_refused(self) -> None:
        """An element that the model lacks is an error that says so."""
        model.assert_unknown_element_refused(self.subject.model, self.main())

    @check
    def test_copies_agree(self) -> None:
        """Pickles and deep copies give the same, also in another process."""
        self.need("copyable", "deterministic")
        model.assert_copies_agree(self.subject.source, self.main())

    @check
    def test_checkpoint_is_safe(self) -> None:
        """Its files load without running code from them."""
        if not self.checkpoint:
            raise NotApplicable("no `checkpoint` is given")
        source = self.subject.source
        model.assert_checkpoint_is_safe(
            source.target, self.checkpoint, self.checkpoint_option, source.options
        )

    def _need_stress(self) -> None:
        self.need("stress")
        if "stress" not in self.subject.model.outputs:
            raise ConformanceError(
                "the model's `outputs` have no stress; say why: capabilities = {'stress': no('...')}"
            )


class DistributedSuite(Conformance):
    """The model on several ranks of this machine's CPU against one process."""

    @check
    def test_parity(self) -> None:
        """Energy, forces, stress and node energies don't depend on the number of ranks."""
        distributed.assert_parity(
            self.subject.source,
            self.subject.structures,
            self.ranks,
            self.subject.strategies,
            self.tolerance(TIGHT),
        )

    @check
    def test_gradient_parity(self) -> None:
        """Nor do gradients of a loss."""
        self.need("differentiable")
        distributed.assert_gradient_parity(*self._case(), self.tolerance(TIGHT))

    @check
    def test_uneven_split(self) -> None:
        """Ranks may own different numbers of atoms."""
        distributed.assert_uneven_split(*self._case(), self.tolerance(TIGHT))

    @check
    def test_empty_rank(self) -> None:
        """A rank may own no atom."""
        distributed.assert_empty_rank(*self._case(), self.tolerance(TIGHT))

    @check
    def test_migration(self) -> None:
        """Atoms may move from rank to rank."""
        distributed.assert_migration(*self._case(), self.tolerance(TIGHT))

    @check
    def test_halo_is_complete(self) -> None:
        """An atom is influenced from within layers x cutoff only."""
        self.need("local", "open_boundaries")
        found = self.subject.model
        reach = found.layers * found.cutoff * (1.0 if "node_energy" in found.outputs else 2.0)
        spacing = found.cutoff / SPACINGS_IN_CUTOFF if self.spacing is None else self.spacing
        line = chain(reach + 2.0 * found.cutoff, spacing, self.symbol)
        distributed.assert_halo_is_complete(found, line, tolerance=self.tolerance(TIGHT))

    @check
    def test_communication_is_steady(self) -> None:
        """Between rebuilds every step communicates alike."""
        distributed.assert_communication_is_steady(*self._case())

    @check
    def test_failure_reaches_caller(self) -> None:
        """A rank that raises ends all of them with its error."""
        distributed.assert_failure_reaches_caller(
            self.subject.source, self.long(), strategy=self.subject.strategies
        )

    def _case(self) -> tuple[Any, Any, Any, Any]:
        return self.subject.source, self.long(), self.ranks, self.subject.strategies

    @classmethod
    def teardown_class(cls) -> None:
        """End the ranks, too."""
        super().teardown_class()
        distributed.close_pools()


SUITES: tuple[type[Conformance], ...] = (PluginSuite, SpecSuite, AdapterSuite, ModelSuite, DistributedSuite)
