"""Files that are damaged or hold what no model has: one error that says so, never other numbers."""

from __future__ import annotations

import copy
import zipfile
from pathlib import Path

import pytest
import torch

from nvdd_core.errors import InputError
from nvdd_mace.conformance import random_module
from nvdd_mace.model import MaceModel, load


def loaded(path, **options):
    return load(dtype=torch.float64, device="cpu", checkpoint=path, **options)


@pytest.mark.parametrize("name", ["data.pkl", "data/0"])
def test_flipped_bits(made, tmp_path, name):
    """torch reads damaged numbers without a word; archives have checksums."""
    data = bytearray(Path(made()[0]).read_bytes())
    with zipfile.ZipFile(made()[0]) as archive:
        (part,) = [part for part in archive.infolist() if part.filename.endswith(f"/{name}")]
        begin = data.index(archive.read(part), part.header_offset)
    data[begin + part.file_size // 2] ^= 1
    (tmp_path / "flipped.model").write_bytes(data)
    with pytest.raises(InputError, match=f"damaged one: Bad CRC-32 for file .*{name}"):
        loaded(tmp_path / "flipped.model")


def test_every_truncation(made, tmp_path):
    whole = Path(made()[0]).read_bytes()
    for kept in (0, 1, 100, len(whole) // 3, len(whole) // 2, len(whole) - 100, len(whole) - 1):
        (tmp_path / "short.model").write_bytes(whole[:kept])
        with pytest.raises(InputError, match=r"short\.model is no file of torch\.save .*or a damaged one"):
            loaded(tmp_path / "short.model")


def test_a_file_without_checksums(made, tmp_path):
    """torch can be told to write none."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(made()[1], tmp_path / "fast.model")
    finally:
        torch.serialization.set_crc32_options(True)
    assert loaded(tmp_path / "fast.model").layers == 2


def test_a_folder(tmp_path):
    for trust in (True, False):
        with pytest.raises(InputError, match="is a folder"):
            loaded(tmp_path, trust=trust)


@pytest.mark.parametrize(
    "part",
    ["r_max", "interactions", "products", "readouts", "radial_embedding", "scale_shift", "atomic_numbers"],
)
def test_missing_parts(made, tmp_path, part):
    module = copy.deepcopy(made()[1])
    delattr(module, part)
    torch.save(module, tmp_path / "part.model")
    with pytest.raises(InputError, match=r"part\.model lacks what models of mace-torch have"):
        loaded(tmp_path / "part.model")


def test_parts_of_another_kind(made, tmp_path):
    module = copy.deepcopy(made()[1])
    module.interactions = torch.nn.ModuleList()
    torch.save(module, tmp_path / "other.model")
    with pytest.raises(InputError, match=r"other\.model lacks"):
        loaded(tmp_path / "other.model")


@pytest.mark.parametrize("numbers", [(0, 8), (8, 300), (-1, 8), (8, 8)])
def test_numbers_of_no_element(numbers):
    module = random_module()
    module.atomic_numbers.copy_(torch.tensor(numbers))
    with pytest.raises(InputError, match=r"atomic numbers are .*no elements, or one twice"):
        MaceModel(module, dtype=torch.float64, device="cpu")


@pytest.mark.parametrize("cutoff", [0.0, -3.0, float("nan"), float("inf")])
def test_no_cutoff(cutoff):
    module = random_module()
    module.r_max.fill_(cutoff)
    with pytest.raises(InputError, match="cutoff is"):
        MaceModel(module, dtype=torch.float64, device="cpu")


def test_weights_that_are_not_finite():
    module = random_module()
    next(module.parameters()).data[0] = torch.nan
    with pytest.raises(InputError, match=r"parameter node_embedding\.\S+ is not finite"):
        MaceModel(module, dtype=torch.float64, device="cpu")


def test_bfloat16(made, tmp_path):
    torch.save(copy.deepcopy(made()[1]).to(torch.bfloat16), tmp_path / "short.model")
    assert loaded(tmp_path / "short.model").dtype is torch.float64


def test_a_head_that_reads_as_a_number(made):
    assert loaded(made(heads=("1", "2"))[0], trust=True, head=2).head == "2"
