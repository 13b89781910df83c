"""How the model runs on several ranks: the adapter of its kernel.

torch can't see what a Warp kernel reads. `MESSAGES` says it: position 0 of the operator, the features, is read on
neighbours, so ghosts need their owners' values first. Rows are plain tensors everywhere else.
"""

from __future__ import annotations

from nvdd_core.adapters import OpAdapter
from nvdd_core.runtime import SPEC_MPNN_HALO, SPEC_MPNN_WIDE, MLIPSpec
from nvdd_core.spec import DistributionSpec, HaloStorage, ScatterMode, StrategyKind

MESSAGES = OpAdapter("nvdd_warp_kernel::messages", gather_inputs=[0])
"""An exchange of the features before the kernel, its adjoint in the backward pass."""

SPEC_WARP_KERNEL = SPEC_MPNN_HALO | MLIPSpec(
    distribution=DistributionSpec(storage=HaloStorage(scatter=ScatterMode.LOCAL), custom_ops=(MESSAGES,))
)


def kernel_spec(strategy: StrategyKind) -> MLIPSpec:
    """Return the spec for a strategy."""
    if strategy is StrategyKind.WIDE_HALO:
        return SPEC_MPNN_WIDE  # ghosts' features are computed in full there
    return SPEC_WARP_KERNEL | MLIPSpec(distribution=DistributionSpec(strategy=strategy))
