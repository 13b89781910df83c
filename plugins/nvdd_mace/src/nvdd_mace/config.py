"""The arguments of mace's constructor, read off the records of a model file.

Key objects: `constructor_arguments`. mace keeps most of them as attributes of the model and its blocks; the rest
follow from shapes. What is found here is checked afterwards, attribute by attribute (`nvdd_mace.rebuild`), so a wrong
guess is an error and never another model. Layer: plugin.
"""

from __future__ import annotations

from typing import Any

import torch

from nvdd_core.errors import InputError
from nvdd_mace.foreign import modules, o3
from nvdd_mace.inspection import SERVED
from nvdd_mace.records import Record, plain

_GATES = {
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "abs": torch.abs,
}
_RADIAL = {"BesselBasis": "bessel", "GaussianBasis": "gaussian", "ChebychevBasis": "chebyshev"}
_TRANSFORMS = {"AgnesiTransform": "Agnesi", "SoftTransform": "Soft"}
_OPTIONAL = (
    "apply_cutoff",
    "use_reduced_cg",
    "use_so3",
    "use_agnostic_product",
    "use_last_readout_only",
    "use_edge_irreps_first",
)


def constructor_arguments(model: Record) -> dict[str, Any]:
    """Return keyword arguments with which mace makes a model like `model`.

    Raises
    ------
    InputError
        When it is of a kind that isn't served or has parts that mace's constructor doesn't make.
    """
    _served(model)
    interactions, products = _children(model, "interactions"), _children(model, "products")
    readouts = _children(model, "readouts")
    last = str_of_irreps(products[-1].get("linear").get("irreps_out"))
    hidden = o3.Irreps(str_of_irreps(products[0].get("linear").get("irreps_out")))
    heads = list(model.get("heads") or ["Default"])
    if not all(isinstance(name, str) for name in heads):
        raise InputError("mace: the names of the heads in the file are no text; it is not served")
    radial = model.get("radial_embedding")
    kind = radial.get("bessel_fn").name
    edge_irreps = model.get("edge_irreps")
    found = {
        "r_max": float(model.get("r_max")),
        "num_bessel": _n_basis(radial.get("bessel_fn")),
        "num_polynomial_cutoff": int(radial.get("cutoff_fn").get("p")),
        "max_ell": max(ell for _, ell, _ in plain(model.get("spherical_harmonics").get("irreps_out"))),
        "interaction_cls": _class_of(interactions[-1]),
        "interaction_cls_first": _class_of(interactions[0]),
        "num_interactions": len(interactions),
        "num_elements": len(model.get("atomic_numbers")),
        "hidden_irreps": hidden,
        "MLP_irreps": _mlp_irreps(readouts[-1], len(heads)),
        "atomic_energies": model.get("atomic_energies_fn").get("atomic_energies").double().numpy(),
        "avg_num_neighbors": plain(interactions[0].get("avg_num_neighbors")),
        "atomic_numbers": model.get("atomic_numbers").tolist(),
        "correlation": [_correlation(product) for product in products],
        "gate": _gate(readouts[-1]),
        "pair_repulsion": model.get("pair_repulsion_fn") is not None,
        "distance_transform": _transform(radial.get("distance_transform")),
        "edge_irreps": None if edge_irreps is None else o3.Irreps(str_of_irreps(edge_irreps)),
        "radial_MLP": _radial_mlp(interactions[0]),
        "radial_type": _RADIAL.get(kind, kind),
        "heads": heads,
        "keep_last_layer_irreps": len(products) > 1 and o3.Irreps(last) != o3.Irreps(str(hidden[0])),
    }
    if len(interactions) > 1:
        found["readout_cls"] = _class_of(readouts[-1])
    found |= {name: plain(value) for name in _OPTIONAL if (value := model.get(name)) is not None}
    found.setdefault("use_reduced_cg", False)
    if model.name == "ScaleShiftMACE":
        scale_shift = model.get("scale_shift")
        found["atomic_inter_scale"] = scale_shift.get("scale").double().numpy()
        found["atomic_inter_shift"] = scale_shift.get("shift").double().numpy()
    return found


def str_of_irreps(value: Any) -> str:
    """Return irreps of the file in the form ``8x0e+8x1o``."""
    if isinstance(value, str):
        return value
    return "+".join(f"{mul}x{ell}{'e' if p == 1 else 'o'}" for mul, ell, p in plain(value))


def _served(model: Any) -> None:
    if not isinstance(model, Record):
        raise InputError(
            f"mace: the file holds a {type(model).__name__}, not a model; give the .model file that mace-torch writes "
            "beside its checkpoints"
        )
    if model.path.partition(".")[0] != "mace" or model.name not in SERVED:
        raise InputError(f"mace: a {model.name} is not served; {' and '.join(SERVED)} are")
    for interaction in _children(model, "interactions"):
        for name in ("cueq_config", "oeq_config"):
            if interaction.get(name) is not None:
                raise InputError(
                    "mace: the file was written after conversion for cuEquivariance or OpenEquivariance; give the one "
                    "from before, and --option backend=cueq or oeq"
                )
    if model.get("joint_embedding") is not None:
        raise InputError("mace: the model embeds further inputs beside elements; such models are not served")


def _children(model: Record, name: str) -> list[Record]:
    return list(model.get(name).part("_modules").values())


def _class_of(block: Record) -> Any:
    found = getattr(modules.blocks, block.name, None)
    if found is None:
        raise InputError(f"mace: the installed mace-torch has no {block.name}, which the file needs")
    return found


def _n_basis(basis: Record) -> int:
    for name in ("bessel_weights", "gaussian_weights"):
        if (weights := basis.get(name)) is not None:
            return len(weights)
    return int(basis.get("num_basis"))


def _mlp_irreps(readout: Record, n_heads: int) -> Any:
    irreps = readout.get("hidden_irreps")
    if irreps is None:  # one layer: there is no such readout, and the argument is not read
        return o3.Irreps("1x0e")
    parts = [(mul // n_heads, (ell, p)) for mul, ell, p in irreps_as_tuples(irreps)]
    return o3.Irreps(parts)


def irreps_as_tuples(value: Any) -> Any:
    """Return irreps of the file, text or records, as tuples ``(mul, l, p)``."""
    if isinstance(value, str):
        return tuple((mul, ir.l, ir.p) for mul, ir in o3.Irreps(value))
    return plain(value)


def _correlation(product: Record) -> int:
    first = _children(product.get("symmetric_contractions"), "contractions")[0]
    return int(first.get("correlation"))


def _gate(readout: Record) -> Any:
    activation = readout.get("non_linearity")
    if activation is None:
        return None
    acts = _children(activation, "acts")
    function = acts[0].get("f") if acts and isinstance(acts[0], Record) else None
    if function is None:
        return None
    name = str(getattr(function, "path", function)).rpartition(".")[2]
    if name not in _GATES:
        raise InputError(f"mace: the readout's gate {name!r} is none of {', '.join(_GATES)}")
    return _GATES[name]


def _transform(transform: Record | None) -> str:
    return "None" if transform is None else _TRANSFORMS.get(transform.name, transform.name)


def _radial_mlp(interaction: Record) -> list[int]:
    own = interaction.get("radial_MLP")  # older releases don't write it
    if own is None:
        own = plain(interaction.get("conv_tp_weights").get("hs"))[1:-1]
    return [int(n) for n in own]
