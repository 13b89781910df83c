"""The conformance kit: what a plugin has to do, as tests that an author gets for free.

A plugin's own test file, complete::

    from nvdd_core.testing import (
        AdapterSuite, Conformance, DistributedSuite, ModelSuite, PluginSuite, SpecSuite, no,
    )

    class Mine(Conformance):
        plugin = "toy"                                   # the entry point
        model = "toy"                                    # optional: default the plugin's only model
        options = {"epsilon": 1.0, "sigma": 1.0}         # optional: of the loader
        symbol = "Ar"                                    # optional: element of the default structures
        capabilities = {"stress": no("forces only")}     # optional: what it can't do, each with a reason

    class TestPlugin(Mine, PluginSuite): ...
    class TestSpec(Mine, SpecSuite): ...
    class TestAdapter(Mine, AdapterSuite): ...
    class TestModel(Mine, ModelSuite): ...
    class TestDistributed(Mine, DistributedSuite): ...

Class attributes are all there is to set: ``plugin``, ``model`` (a name, ``"package.module:loader"`` or an importable
loader), ``options``, ``symbol``, ``spacing``, ``structures``, ``capabilities``, ``tolerances``, ``ranks``,
``op_samples``, ``checkpoint``, ``checkpoint_option``; see `Conformance`. A standard test may be overridden with
``@overrides(reason="...")`` only.

pytest collects the classes; nothing of it is needed: each check is a plain function, too (``assert_parity(model,
atoms)``, ``assert_restores(adapter)``, ...), and ``python -m nvdd_core.testing NAME [--quick] [--json]`` runs them all
for an installed plugin. A failure is a `ConformanceError`, whose message ends with where the check is documented.

Invariant: the kit changes nothing of what it checks, and ends every process that it started. Layer: testing.
"""

from __future__ import annotations

from nvdd_core.runtime.source import ModelSource
from nvdd_core.testing.adapter_checks import (
    assert_adapter_round_trip,
    assert_nested_use_restores,
    assert_op_is_well_formed,
    assert_restores,
    assert_restores_after_exception,
    assert_second_owner_refused,
)
from nvdd_core.testing.base import Conformance, overrides
from nvdd_core.testing.capabilities import CAPABILITIES, Reduced, no, only
from nvdd_core.testing.distributed_checks import (
    assert_communication_is_steady,
    assert_empty_rank,
    assert_failure_reaches_caller,
    assert_gradient_parity,
    assert_halo_is_complete,
    assert_migration,
    assert_parity,
    assert_uneven_split,
    close_pools,
)
from nvdd_core.testing.evaluation import Evaluated, evaluate
from nvdd_core.testing.failures import DOCS_URL, ConformanceError, NotApplicable, PartlyChecked
from nvdd_core.testing.model_checks import (
    assert_checkpoint_is_safe,
    assert_copies_agree,
    assert_deterministic,
    assert_float32_close_to_float64,
    assert_forces_match_finite_differences,
    assert_global_state_kept,
    assert_inputs_untouched,
    assert_results_do_not_alias,
    assert_stress_matches_finite_differences,
    assert_unknown_element_refused,
)
from nvdd_core.testing.plugin_checks import (
    assert_entry_point_is_unique,
    assert_hooks_are_idempotent,
    assert_listing_is_light,
    assert_listing_row_fits_schema,
    assert_names_are_valid,
    assert_package_is_typed,
    assert_refs_resolve,
    assert_requirement_is_bounded,
)
from nvdd_core.testing.runner import CheckResult, run
from nvdd_core.testing.spec_checks import (
    assert_spec_can_be_copied,
    assert_spec_is_frozen,
    assert_spec_merge_is_lossless,
    assert_spec_refuses_unknown_keys,
    assert_spec_round_trip,
    assert_specs_reach_workers,
)
from nvdd_core.testing.steady_checks import check_capturable, refuse_waiting
from nvdd_core.testing.structures import chain, default_structures
from nvdd_core.testing.suites import AdapterSuite, DistributedSuite, ModelSuite, PluginSuite, SpecSuite
from nvdd_core.testing.symmetry_checks import (
    assert_batch_equals_alone,
    assert_isolated_atoms,
    assert_lattice_translation_of_atoms,
    assert_replica_doubles_energy,
    assert_rigid_translation,
    assert_rotation,
    assert_row_order_is_free,
)
from nvdd_core.testing.tolerances import EXACT, SINGLE, SLOPE, TIGHT, Tolerance

__all__ = [
    "CAPABILITIES",
    "DOCS_URL",
    "EXACT",
    "SINGLE",
    "SLOPE",
    "TIGHT",
    "AdapterSuite",
    "CheckResult",
    "Conformance",
    "ConformanceError",
    "DistributedSuite",
    "Evaluated",
    "ModelSource",
    "ModelSuite",
    "NotApplicable",
    "PartlyChecked",
    "PluginSuite",
    "Reduced",
    "SpecSuite",
    "Tolerance",
    "assert_adapter_round_trip",
    "assert_batch_equals_alone",
    "assert_checkpoint_is_safe",
    "assert_communication_is_steady",
    "assert_copies_agree",
    "assert_deterministic",
    "assert_empty_rank",
    "assert_entry_point_is_unique",
    "assert_failure_reaches_caller",
    "assert_float32_close_to_float64",
    "assert_forces_match_finite_differences",
    "assert_global_state_kept",
    "assert_gradient_parity",
    "assert_halo_is_complete",
    "assert_hooks_are_idempotent",
    "assert_inputs_untouched",
    "assert_isolated_atoms",
    "assert_lattice_translation_of_atoms",
    "assert_listing_is_light",
    "assert_listing_row_fits_schema",
    "assert_migration",
    "assert_names_are_valid",
    "assert_nested_use_restores",
    "assert_op_is_well_formed",
    "assert_package_is_typed",
    "assert_parity",
    "assert_refs_resolve",
    "assert_replica_doubles_energy",
    "assert_requirement_is_bounded",
    "assert_restores",
    "assert_restores_after_exception",
    "assert_results_do_not_alias",
    "assert_rigid_translation",
    "assert_rotation",
    "assert_row_order_is_free",
    "assert_second_owner_refused",
    "assert_spec_can_be_copied",
    "assert_spec_is_frozen",
    "assert_spec_merge_is_lossless",
    "assert_spec_refuses_unknown_keys",
    "assert_spec_round_trip",
    "assert_specs_reach_workers",
    "assert_stress_matches_finite_differences",
    "assert_uneven_split",
    "assert_unknown_element_refused",
    "chain",
    "check_capturable",
    "close_pools",
    "default_structures",
    "evaluate",
    "no",
    "only",
    "overrides",
    "refuse_waiting",
    "run",
]
