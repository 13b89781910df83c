"""What a tensor's rows may be declared to be: the checks of `ShardTensor.wrap`.

Layer: tensor.
"""

from __future__ import annotations

from nvdd_core.errors import SpecError
from nvdd_core.tensor.lookup import GatherMetadata
from nvdd_core.tensor.meta import ParticleHaloConfig, ParticleHaloMetadata, RowLayout
from nvdd_core.tensor.modes import DispatchSpec, RowKind, StorageKind


def check_storage(
    spec: DispatchSpec | None,
    meta: ParticleHaloMetadata | None,
    gather_meta: GatherMetadata | None,
    config: ParticleHaloConfig | None,
) -> None:
    """Raise when spec and metadata speak of different storages, or of different meshes.

    Raises
    ------
    SpecError
    """
    if gather_meta is not None and not isinstance(gather_meta, GatherMetadata):
        raise SpecError(
            f"gather_meta must be a GatherMetadata (sharded storage), found {type(gather_meta).__name__}; make one "
            "by GatherMetadata.build(mesh, ids)"
        )
    if meta is not None and gather_meta is not None:
        raise SpecError("rows have one storage: pass meta (halo) or gather_meta (sharded storage), not both")
    storage = None if spec is None else spec.dispatch_rules.storage
    if storage is StorageKind.SHARDED and gather_meta is None:
        raise SpecError(
            "the spec asks for sharded storage (owned rows only, looked up by global id), which needs "
            "gather_meta=GatherMetadata.build(mesh, ids)"
        )
    if gather_meta is not None and storage not in (None, StorageKind.SHARDED):
        raise SpecError(
            f"gather_meta belongs to sharded storage, but the spec asks for {storage} storage; change one of them"
        )
    if storage is StorageKind.REPLICATED and meta is not None:
        raise SpecError("replicated storage has no halo; wrap without meta, or use a spec with halo storage")
    layout: RowLayout | None = meta or gather_meta
    if layout is not None and config is not None and config.mesh is not layout.mesh:
        raise SpecError("the rows' metadata and their config name different meshes; build both from one mesh")


def resolve_kind(
    shape: tuple[int, ...], layout: RowLayout | None, n_systems: int | None, kind: RowKind | None
) -> tuple[RowKind | None, bool]:
    """Return the kind of a tensor of `shape`, and whether segments could be meant as well.

    Raises
    ------
    SpecError
        When the length fits no kind, or not the one named.
    """
    if kind is None and layout is None:
        return None, False
    rows = shape[0] if shape else -1
    lengths: dict[RowKind, int | None] = {
        RowKind.LOCAL: None,
        RowKind.OWNED: None,
        RowKind.SEGMENTS: n_systems,
    }
    if layout is not None:
        lengths[RowKind.OWNED] = layout.n_owned
        lengths[layout.ROW_KIND] = layout.n_padded
    if kind is not None:
        kind = RowKind(kind)
        if lengths[kind] == rows:
            return kind, False
    elif layout is not None and rows == layout.n_padded:
        return layout.ROW_KIND, rows == n_systems
    elif rows == n_systems:
        return RowKind.SEGMENTS, False
    known = ", ".join(f"{k.value} {'unknown' if n is None else n}" for k, n in lengths.items())
    said = "no kind" if kind is None else f"kind {kind.value!r}"
    where = "" if layout is None else f"rank {layout.mesh.rank}: "
    raise SpecError(
        f"{where}a tensor of shape {shape} with {said} fits none of the row counts ({known}); pass the rows in "
        "full, name their kind (under a halo RowKind.OWNED is never assumed), or leave a tensor without rows "
        "unwrapped"
    )
