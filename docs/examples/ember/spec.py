"""How the model runs on several ranks."""

from __future__ import annotations

from nvdd_core.runtime import SPEC_MPNN_HALO, MLIPSpec
from nvdd_core.spec import DistributionSpec, HaloStorage, ScatterMode

# Plain torch: the framework refreshes ghosts after each sum into rows. Every receiver of its list is owned, so
# nothing has to be added back.
SPEC = SPEC_MPNN_HALO | MLIPSpec(
    distribution=DistributionSpec(storage=HaloStorage(scatter=ScatterMode.REFRESH))
)
