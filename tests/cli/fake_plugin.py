"""A plugin in a folder, as a user could have it on PYTHONPATH: plain-torch Lennard-Jones that fails when told to.

`install(folder)` writes module, light module and distribution metadata; nothing is installed with pip.
"""

from __future__ import annotations

from pathlib import Path

_PLUGIN = """
import os

from nvdd_core.plugins import ModelDecl, PluginInfo, Ref, hookimpl

print("noise of the light module")
os.write(1, b"noise of the light module on the descriptor\\n")


@hookimpl
def nvdd_plugin_info():
    return PluginInfo(api=1, title="fake")

@hookimpl
def nvdd_declare_models():
    yield ModelDecl("fake", Ref("fake_x.model:load"), paths=("cutoff_file",))
"""

_MODEL = """
import ctypes
import os
import signal
import sys

import torch

from nvdd_core.errors import InputError
from nvdd_core.runtime import SPEC_MPNN_HALO, SPEC_MPNN_GP

print("noise on standard output")
os.write(1, b"noise on the descriptor\\n")
ctypes.CDLL(None).printf(b"noise of C code\\n")


class Stop(BaseException):
    pass


def load(*, dtype, device, cutoff=2.5, epsilon=1.0, fail="", on=0, cutoff_file=None):
    if cutoff_file is not None:
        with open(cutoff_file) as file:
            cutoff = float(file.read())
    if int(os.environ.get("RANK", 0)) == on:
        if fail == "load":
            raise ValueError("cannot load\\nfor a long reason")
        if fail == "quit":
            sys.exit("tired")
        if fail == "refuse":
            raise InputError("this model file is not for you")
    return Fake(dtype, device, cutoff, epsilon, fail, on)


class Fake:
    outputs = frozenset({"energy", "forces", "stress"})
    layers = 1
    neighbor_form = "full"

    def __init__(self, dtype, device, cutoff, epsilon, fail, on):
        self.dtype, self.device, self.cutoff, self.epsilon = dtype, device, cutoff, epsilon
        self.fail = fail if int(os.environ.get("RANK", 0)) == on else ""

    def distribution_spec(self, strategy):
        return SPEC_MPNN_GP if strategy.value == "graph_partition" else SPEC_MPNN_HALO

    def check(self, numbers, ids):
        bad = (numbers != 18).nonzero()
        if bad.numel():
            raise InputError(f"atom {int(ids[bad[0, 0]])} is not argon")

    def forward(self, batch):
        if self.fail == "forward":
            raise ValueError("forward went wrong")
        if self.fail == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fail == "exit":
            sys.exit(0)
        if self.fail == "stop":
            raise Stop("enough")
        if self.fail == "blow":
            return {"node_energy": batch.positions[: batch.n_owned].sum(1) * float("nan")}
        r = batch.edge_vectors().square().sum(1)
        s = torch.where(r < self.cutoff**2, r, torch.inf).reciprocal() ** 3
        energy = 2.0 * self.epsilon * (s * s - s)
        out = energy.new_zeros(batch.n_local).index_add(0, batch.edge_index[1], energy)
        return {"node_energy": out[: batch.n_owned]}
"""


def install(folder: Path) -> Path:
    """Write the plugin into `folder` and return the entry for PYTHONPATH."""
    package, info = folder / "fake_x", folder / "fake_x-1.5.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_plugin.py").write_text(_PLUGIN)
    (package / "model.py").write_text(_MODEL)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-x\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[nvdd.plugins]\nfake = fake_x._plugin\n")
    return folder
