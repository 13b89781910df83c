"""Files: read without running anything in them; refusals; options; the state of the process."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from mace_ranks import compare, oracle

from nvdd_core.errors import InputError
from nvdd_core.testing import evaluate
from nvdd_mace.conformance import random_module
from nvdd_mace.inspection import flag
from nvdd_mace.model import MaceModel, load

CPU = torch.device("cpu")


def loaded(path, **options):
    return load(**{"dtype": torch.float64, "device": CPU, "checkpoint": path, **options})


def trusted(path, **options):
    """Load ten times as fast, where reading isn't what is tested."""
    return loaded(path, trust=True, **options)


class Planted:
    """Writes a file when it is unpickled by a loader that runs what it finds."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return Path.touch, (Path(self.marker),)


class PlantedEval(Planted):
    def __reduce__(self):
        return eval, (f"open({self.marker!r}, 'w').close()",)


class PlantedGraph(Planted):
    """What a torch.fx graph in a file does: its source, with a line of somebody's own, is run."""

    def __reduce__(self):
        from torch.fx.graph_module import reduce_graph_module

        body = {"_code": f"open({self.marker!r}, 'w').close()\ndef forward(self):\n    return 0\n"}
        return reduce_graph_module, (body, "")


@pytest.mark.parametrize("trust", [False, True])
def test_a_file_gives_what_its_model_gives(made, structures, trust):
    path, module = made()
    model = loaded(path, trust=trust)
    assert (model.layers, model.cutoff, model.symbols) == (2, 3.0, ("O", "Si"))
    found = evaluate(model, structures["crystal"])
    compare(_as_found(found), oracle(module, structures["crystal"]))


def _as_found(found):
    class Result:
        energy, forces, node_energy = found.energy, found.forces, found.node_energy
        stress = None if found.stress is None else found.stress[0]

    return Result


def test_reading_runs_no_code_of_the_file(made, monkeypatch):
    """Neither pickled Python, nor torch.fx source, nor TorchScript, nor a foreign class's __setstate__."""
    import torch.fx.graph_module as graph_module
    from e3nn.util.codegen import CodeGenMixin

    path, _ = made()

    def never(*args, **kwargs):
        raise AssertionError("code of the file was run")

    monkeypatch.setattr(torch.jit, "load", never)
    monkeypatch.setattr(graph_module, "reduce_graph_module", never)
    monkeypatch.setattr(CodeGenMixin, "__setstate__", never)
    monkeypatch.setattr(pickle, "loads", never)
    assert loaded(path).layers == 2


class PlantedGetattr:
    """Takes an attribute of something, as files do with torch's functions."""

    def __init__(self, owner, name):
        self.taken = owner, name

    def __reduce__(self):
        return getattr, self.taken


@pytest.mark.parametrize("kind", [Planted, PlantedEval, PlantedGraph])
@pytest.mark.parametrize("inside", [True, False], ids=["in a model", "alone"])
def test_a_planted_file_is_refused_and_does_nothing(tmp_path, kind, inside):
    marker, path = tmp_path / "marker", tmp_path / "planted.model"
    planted = kind(marker)
    if inside:
        module = random_module()
        module.heads = [planted]
        planted = module
    torch.save(planted, path)
    with pytest.raises(InputError, match=r"mace: .*(nothing of it was run|holds a|not served)"):
        loaded(path)
    assert not marker.exists()
    with pytest.raises(InputError):
        loaded(path, trust="yes please")
    assert not marker.exists()


def test_trust_runs_the_file(tmp_path):
    marker, path = tmp_path / "marker", tmp_path / "planted.model"
    torch.save(Planted(marker), path)
    with pytest.raises(InputError, match=r"holds a NoneType, not a model"):
        loaded(path, trust=True)
    assert marker.exists()


def test_names_are_told(tmp_path):
    path = tmp_path / "planted.model"
    torch.save(PlantedEval(tmp_path / "marker"), path)
    with pytest.raises(InputError, match=r"eval, which the files of mace don't.*trust=true"):
        loaded(path)


_FUNCTIONS = torch._C._VariableFunctionsClass


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Path, "touch"),
        (torch.nn.Module, "load_state_dict"),
        (torch.nn.Module, "abs"),
        (_FUNCTIONS, "from_file"),
        (_FUNCTIONS, "relu"),
        (_FUNCTIONS, "__class__"),
        (_FUNCTIONS, ["abs"]),
        ("abs", "abs"),
    ],
)
def test_attributes_in_a_file_are_not_taken(tmp_path, owner, name):
    """Of all attributes only those are known that are gates of mace."""
    module = random_module()
    module.heads = [PlantedGetattr(owner, name)]
    torch.save(module, tmp_path / "planted.model")
    with pytest.raises(InputError, match=r"by getattr.*nothing of it was run|which the files of mace don't"):
        loaded(tmp_path / "planted.model")


def test_an_edited_model_is_refused(tmp_path):
    """A file whose attributes the installed mace wouldn't make is no other model, but an error that says what."""
    module = random_module()
    module.interactions[1].linear.instructions[0] = (
        module.interactions[1].linear.instructions[0]._replace(path_weight=0.5)
    )
    torch.save(module, tmp_path / "edited.model")
    with pytest.raises(InputError, match=r"another model .*interactions\.1\.linear\.instructions"):
        loaded(tmp_path / "edited.model")
    assert loaded(tmp_path / "edited.model", trust=True).layers == 2


def test_numpy_numbers_in_a_file(tmp_path, structures):
    """mace's training writes some arguments as numbers of numpy."""
    module = random_module(avg_num_neighbors=np.float64(7.25))
    torch.save(module, tmp_path / "numpy.model")
    found = evaluate(loaded(tmp_path / "numpy.model"), structures["crystal"])
    compare(_as_found(found), oracle(module, structures["crystal"]))


def test_another_coupling_basis(tmp_path, structures):
    """Coupling matrices have the file's shapes: they depend on what was installed when it was made."""
    module = random_module()
    for part in module.modules():
        if type(part).__name__ == "Contraction":  # one more path, with weights of its own
            number = part.correlation
            for name, weights in ((f"U_matrix_{number}", "weights_max"),):
                matrix, w = part._buffers[name], part._parameters[weights]
                part._buffers[name] = torch.cat([matrix, 0.3 * matrix[..., :1]], -1)
                part._parameters[weights] = torch.nn.Parameter(torch.cat([w, w[:, :1] + 0.1], 1).detach())
    torch.save(module, tmp_path / "other.model")
    found = evaluate(loaded(tmp_path / "other.model"), structures["crystal"])
    compare(_as_found(found), oracle(module, structures["crystal"]))


def test_a_model_made_in_float32_and_stored_in_float64(tmp_path, structures):
    """Its constants are those of float32, as mace has them."""
    module = random_module(dtype=torch.float32).double()
    torch.save(module, tmp_path / "widened.model")
    found = evaluate(loaded(tmp_path / "widened.model"), structures["crystal"])
    compare(_as_found(found), oracle(module, structures["crystal"]))


def test_files_that_are_no_models(tmp_path, made):
    with pytest.raises(InputError, match=r"give the model file .*checkpoint=PATH"):
        load(dtype=torch.float64, device=CPU)
    with pytest.raises(InputError, match="there is no file"):
        loaded(tmp_path / "absent.model")
    with pytest.raises(InputError, match="there is no file"):
        loaded(tmp_path / "absent.model", trust=True)
    with pytest.raises(
        InputError, match=r"checkpoint is \['a', 'b'\]; give the path of one file; committees"
    ):
        loaded(["a", "b"])
    (tmp_path / "text.model").write_text("hello")
    with pytest.raises(InputError, match=r"no file of torch\.save"):
        loaded(tmp_path / "text.model")
    with zipfile.ZipFile(tmp_path / "zip.model", "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(InputError, match="can't be read"):
        loaded(tmp_path / "zip.model")
    torch.save(random_module().state_dict(), tmp_path / "state.model")
    with pytest.raises(InputError, match="holds a OrderedDict, not a model"):
        loaded(tmp_path / "state.model")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "linear.model")
    with pytest.raises(InputError, match="a Linear is not served; MACE and ScaleShiftMACE are"):
        loaded(tmp_path / "linear.model")
    with pytest.raises(InputError, match="a Linear is not served"):
        loaded(tmp_path / "linear.model", trust=True)
    truncated = Path(made()[0]).read_bytes()[:5000]
    (tmp_path / "truncated.model").write_bytes(truncated)
    with pytest.raises(InputError, match="mace: "):
        loaded(tmp_path / "truncated.model")


def test_torchscript_is_refused(tmp_path):
    class Scripted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    torch.jit.save(torch.jit.script(Scripted()), tmp_path / "compiled.model")
    with pytest.raises(InputError, match=r"TorchScript.*before compilation"):
        loaded(tmp_path / "compiled.model")


def test_a_converted_file_is_refused(tmp_path):
    module = random_module()
    module.interactions[0].cueq_config = "something"
    torch.save(module, tmp_path / "cueq.model")
    with pytest.raises(InputError, match="after conversion for cuEquivariance"):
        loaded(tmp_path / "cueq.model")


def test_models_that_are_not_served():
    module = random_module(
        embedding_specs={"charge": {"type": "continuous", "in_dim": 1, "emb_dim": 2, "per": "graph"}}
    )
    with pytest.raises(InputError, match=r"embeds further inputs \(charge\)"):
        MaceModel(module, dtype=torch.float64, device=CPU)


def test_heads(made):
    path, _ = made(heads=("first", "second"))
    with pytest.raises(InputError, match="several heads: first, second; give --option head=NAME"):
        trusted(path)
    with pytest.raises(InputError, match="no head 'third'; its heads: first, second"):
        trusted(path, head="third")
    with pytest.raises(InputError, match=r"head is \['second'\]; give the name of one head"):
        trusted(path, head=["second"])
    assert trusted(path, head="second").head == "second"
    assert trusted(made()[0]).head == "Default"


def test_unknown_elements_are_named(made):
    model = trusted(made()[0])
    numbers, ids = torch.tensor([8, 14, 26, 8, 26]), torch.tensor([7, 3, 21, 4, 12])
    with pytest.raises(
        InputError, match=r"does not know Fe \(2 atoms, the first is atom 12\); it knows O, Si"
    ):
        model.check(numbers, ids)
    with pytest.raises(InputError, match=r"does not know Fe \(atom 2\)"):
        model.check(numbers[:3])
    with pytest.raises(InputError, match=r"atomic number 0, atomic number 200"):
        model.check(torch.tensor([0, 200]), ids[:2])
    model.check(torch.tensor([8, 14]), ids[:2])


def test_options(made):
    path, _ = made()
    with pytest.raises(InputError, match=r"dtype torch\.float16 is not served"):
        trusted(path, dtype=torch.float16)
    with pytest.raises(InputError, match="backend is 'fast'; give e3nn, cueq or oeq"):
        trusted(path, backend="fast")
    assert [flag("x", v) for v in (True, "true", "No", 0, "1")] == [True, True, False, False, True]
    assert not any(p.requires_grad for p in trusted(path).module.parameters())
    assert any(p.requires_grad for p in trusted(path, trainable="true").module.parameters())


@pytest.mark.parametrize(("backend", "package"), [("cueq", "cuequivariance"), ("oeq", "openequivariance")])
def test_backends_that_are_not_installed(made, backend, package):
    pytest.importorskip("mace")
    if __import__("importlib.util").util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(InputError, match=f"backend={backend} needs {package}"):
        trusted(made()[0], backend=backend)


@pytest.fixture
def converter(monkeypatch):
    """Put something in the place of mace's converter for cueq, by how much it changes weights of a readout."""
    import types

    from nvdd_mace import backends

    def put(change):
        def run(module, *, return_model, device):
            torch.set_default_dtype(torch.float64)  # as mace's do
            with torch.no_grad():
                module.readouts[0].linear.weight.mul_(change)
            return module

        monkeypatch.setattr(backends, "imported", lambda name: types.SimpleNamespace(run=run))

    monkeypatch.setitem(backends.BACKENDS, "cueq", ("somewhere", ()))
    return put


def test_a_converter_is_checked(made, converter):
    """What a backend computes is compared with e3nn on load, told, and refused where it is something else."""
    path, _ = made()
    converter(1.0)
    with pytest.warns(UserWarning, match=r"forces by cueq differ by at most 0\.0e\+00 eV/A from e3nn's$"):
        assert trusted(path, backend="cueq").layers == 2
    for change in (1.5, 1 + 1e-6):
        converter(change)
        with pytest.raises(InputError, match="more than the 1e-09 that rounding explains; use backend=e3nn"):
            trusted(path, backend="cueq")
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("trust", [False, True])
def test_a_converter_makes_constants_of_a_file_of_float32_anew(made, converter, trust):
    path, _ = made(dtype=torch.float32)
    converter(1 + 1e-6)
    with pytest.warns(
        UserWarning,
        match=r"at most \S+e-0\d eV/A from e3nn's: the file was made in float32 and has constants",
    ):
        loaded(path, backend="cueq", trust=trust)
    converter(1.5)
    with pytest.raises(
        InputError, match="1e-05 that constants of a file made in float32 explain; use backend"
    ):
        loaded(path, backend="cueq", trust=trust)


def test_the_difference_is_told_in_one_line(made, converter):
    path, _ = made()
    converter(1.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trusted(path, backend="cueq")
    (told,) = [w for w in seen if w.category is UserWarning]
    line = warnings.formatwarning(told.message, told.category, told.filename, told.lineno)
    assert line.count("\n") == 1
    assert line.endswith("from e3nn's\n")


def test_models_can_be_copied_although_mace_has_empty_parameters():
    import copy

    module = random_module(
        use_agnostic_product=True, use_last_readout_only=True, use_so3=True, pair_repulsion=True
    )
    model = MaceModel(module, dtype=torch.float64, device=CPU)
    assert copy.deepcopy(model).layers == pickle.loads(pickle.dumps(model)).layers == 2


_QUIET = """
import io, os, sys, torch
from nvdd_mace.model import load
assert "mace" in sys.modules
assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in os.environ
model = load(dtype=torch.float64, device="cpu", checkpoint=sys.argv[1])
assert torch.get_default_dtype() is torch.float32
from nvdd_core.testing import evaluate, default_structures
evaluate(model, default_structures(3.0, ("O", "Si"), 1.9)["crystal"])
assert torch.get_default_dtype() is torch.float32
assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in os.environ
"""


def test_importing_and_loading_leave_the_process_as_it_is(made):
    """Nothing is printed, and torch is not told to run code of files, as mace does when it is imported."""
    env = {k: v for k, v in os.environ.items() if k != "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"}
    done = subprocess.run(
        [sys.executable, "-c", _QUIET, made()[0]],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_random_state_is_kept(made):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    loaded(made()[0])
    assert torch.equal(torch.rand(2), expected)


def test_a_file_in_memory_is_like_one_on_disk(made, tmp_path):
    """Saved again after reading, a model is the same file to a reader."""
    path, _ = made()
    buffer = io.BytesIO()
    torch.save(loaded(path).module, buffer)
    (tmp_path / "again.model").write_bytes(buffer.getvalue())
    again, first = loaded(tmp_path / "again.model").module.state_dict(), loaded(path).module.state_dict()
    assert all(torch.equal(again[name], value) for name, value in first.items())
