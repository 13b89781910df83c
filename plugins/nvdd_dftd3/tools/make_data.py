"""Make the data that nvdd-dftd3 ships from those of tad-dftd3; run by hand, when these change.

    pip install --no-deps --target /tmp/tad tad-dftd3==0.7.0 tad-mctc==0.8.0
    PYTHONPATH=/tmp/tad python tools/make_data.py

Writes ``references.npz`` and ``functionals.json`` beside the plugin's modules. Both packages are Apache-2.0 licensed
(Copyright 2024 Grimme Group); what is written here is their numbers in another layout, nothing is computed anew.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import tad_dftd3
import torch
from tad_dftd3.data import R4R2
from tad_dftd3.reference import Reference
from tad_mctc.data.radii import COV_D3

OUT = Path(__file__).parent.parent / "src" / "nvdd_dftd3"


def _expect(holds: torch.Tensor, what: str) -> None:
    """Stop where tad-dftd3's tables are not what this script takes them for; under ``python -O``, too."""
    if not bool(holds.all()):
        raise ValueError(f"tad-dftd3's tables have changed: expected that {what}")


def references() -> dict[str, np.ndarray]:
    """Return what depends on elements; row Z belongs to atomic number Z, row 0 to none."""
    reference = Reference(dtype=torch.float64)
    n = reference.cn.shape[0]
    there = reference.cn >= 0
    counts = there.sum(1)
    # an element's references come first, so that a count says which they are
    _expect(there == (torch.arange(there.shape[1]) < counts[:, None]), "an element's references come first")
    c6 = reference.c6.permute(0, 2, 1, 3)[there][:, there]
    _expect(c6 > 0, "C6 is positive")
    _expect(c6 == c6.T, "C6 is symmetric")
    upper = np.triu_indices(c6.shape[0])
    return {
        "counts": counts.numpy().astype(np.int8),
        "cn": reference.cn[there].numpy(),
        "c6_upper": c6.numpy()[upper],
        "covalent_radii": COV_D3(dtype=torch.float64)[:n].numpy(),
        "sqrt_r4_r2": R4R2(dtype=torch.float64)[:n].numpy(),
    }


def functionals() -> dict[str, object]:
    """Return the parameters of rational (Becke-Johnson) damping by functional, and other names of functionals."""
    folder = Path(tad_dftd3.__file__).parent / "param"
    found = tomllib.loads((folder / "parameters.toml").read_text())
    aliases = tomllib.loads((folder / "aliases.toml").read_text())["alias"]
    default = found["default"]["parameter"]["d3"]["bj"]
    functionals = {}
    for name, entry in sorted(found["parameter"].items()):
        if "bj" not in entry.get("d3", {}):
            continue
        given = {**default, **entry["d3"]["bj"]}
        functionals[name] = {key: given[key] for key in ("s6", "s8", "a1", "a2")}
    kept = {alias: name for alias, name in sorted(aliases.items()) if name in functionals and alias.isascii()}
    return {
        "source": f"tad-dftd3 {tad_dftd3.__version__} (Apache-2.0, Grimme Group), parameters.toml of s-dftd3",
        "functionals": functionals,
        "aliases": kept,
    }


if __name__ == "__main__":
    np.savez_compressed(OUT / "references.npz", **references())
    text = json.dumps(functionals(), indent=0).replace(',\n"s8', ', "s8').replace(',\n"a', ', "a')
    text = text.replace('{\n"s6', '{"s6').replace("\n}", "}")
    (OUT / "functionals.json").write_text(text + "\n")
