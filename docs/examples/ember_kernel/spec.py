"""How the model runs on several ranks: the adapter of its kernel."""

from __future__ import annotations

from nvdd_core.adapters import OpAdapter
from nvdd_core.runtime import SPEC_MPNN_HALO, MLIPSpec
from nvdd_core.spec import DistributionSpec, HaloStorage, ScatterMode

# Input 0 of the kernel, the features, is read on neighbours: ghosts take their owners' values first.
MESSAGE_SUM = OpAdapter("ember::message_sum", gather_inputs=[0])

SPEC = SPEC_MPNN_HALO | MLIPSpec(
    distribution=DistributionSpec(
        storage=HaloStorage(scatter=ScatterMode.LOCAL),
        custom_ops=(MESSAGE_SUM,),
    )
)
