"""Reading ShardTensors from files without trusting the file: what ``torch.load(weights_only=True)`` must know.

Layer: tensor.
"""

from __future__ import annotations

import pickle
import pickletools
import pkgutil
from typing import Any

from nvdd_core.tensor.lookup import _read_directory
from nvdd_core.tensor.meta import MeshPlace, _read_config, _read_metadata
from nvdd_core.tensor.modes import RowKind, ScatterMode, StorageKind
from nvdd_core.tensor.shard_tensor import ShardTensor, _rebuild

_KNOWN_TO_TORCH = ("__builtin__ ", "copy_reg ", "_codecs ", "collections ")


def safe_globals(*specs: Any) -> list[Any]:
    """Return what a file with ShardTensors may name, for ``torch.serialization.add_safe_globals``.

    Parameters
    ----------
    *specs
        Specs that tensors in the file were wrapped with, or others of the same make: their classes are included.

    Returns
    -------
    list of classes and functions

    Examples
    --------
    ::

        with torch.serialization.safe_globals(safe_globals(spec)), loading_onto(mesh):
            x = torch.load(path, weights_only=True)
    """
    own: list[Any] = [ShardTensor, MeshPlace, RowKind, ScatterMode, StorageKind]
    own += [_rebuild, _read_metadata, _read_config, _read_directory]
    named = {
        str(value).replace(" ", ":", 1)
        for op, value, _ in pickletools.genops(pickle.dumps(specs, protocol=2))
        if op.name == "GLOBAL" and not str(value).startswith(_KNOWN_TO_TORCH)
    }
    return [*own, *map(pkgutil.resolve_name, sorted(named))]
