"""What goes wrong in a rank is one error in the program, the next call works, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ase
import numpy as np
import pytest

from nvdd_core.errors import DistributedError, InputError, NumericalError, PluginNotFoundError, RankLostError
from nvdd_core.interop.ase import DomainCalculator
from tests.interop import models
from tests.interop.conftest import close, crystal, new_calculator
from tests.validate.conftest import bar

ROOT = Path(__file__).resolve().parents[2]
Living = Callable[[], list[int]]


def moody(**others: object) -> DomainCalculator:
    """Two ranks with a model that fails on purpose."""
    given = {"ranks": 2, "device": "cpu", "timeout_s": 120.0, **others}
    return DomainCalculator("tests.interop.models:Moody", **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def calc() -> Iterator[DomainCalculator]:
    """One calculator for all faults: each has to leave it usable."""
    with moody() as calculator:
        yield calculator


def good(calc: DomainCalculator) -> np.ndarray:
    """Forces that no fault may change."""
    atoms = bar()
    atoms.calc = calc
    return np.asarray(atoms.get_forces())


def with_element(number: int) -> ase.Atoms:
    atoms = bar()
    atoms.numbers[77] = number
    return atoms


def not_a_number() -> ase.Atoms:
    atoms = bar()
    atoms.positions[5, 1] = np.nan
    return atoms


def bad_cell() -> ase.Atoms:
    atoms = bar()
    atoms.cell[1] = atoms.cell[0]
    return atoms


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: with_element(models.REFUSED), InputError, "atom 77 is thorium"),
        (not_a_number, InputError, "position of atom 5 is not finite"),
        (bad_cell, InputError, "cell|linearly|system 0"),
    ],
)
def test_a_refusal_leaves_the_ranks_alive(
    make: Callable[[], ase.Atoms], kind: type[Exception], said: str, calc: DomainCalculator
) -> None:
    expected = good(calc)
    before, pool = calc.n_evaluations, calc._crew._pool
    for _ in range(3):
        atoms = make()
        atoms.calc = calc
        with pytest.raises(kind, match=said) as caught:
            atoms.get_forces()
        assert type(caught.value) is kind
        with pytest.raises(kind):  # and not some older result
            atoms.get_potential_energy()
        assert calc.n_evaluations == before
        calc.reset()
        assert close(good(calc), expected)
        before = calc.n_evaluations
    assert calc._crew._pool is pool


def test_atoms_on_top_of_each_other_and_moved_away(calculator: DomainCalculator) -> None:
    atoms = crystal(3, 1, 1)
    atoms.calc = calculator
    expected, pool = atoms.get_forces(), calculator._crew._pool
    kept = atoms.positions[6].copy()
    for place, kind in ((atoms.positions[5], NumericalError), (np.full(3, np.inf), InputError)):
        atoms.positions[6] = place
        with pytest.raises(kind, match=r"atom [56] "):
            atoms.get_forces()
        atoms.positions[6] = kept
        assert close(atoms.get_forces(), expected)
    bad = crystal(3, 1, 1)
    bad.numbers[4] = 17
    bad.calc = calculator
    with pytest.raises(InputError, match="no parameters for Cl"):
        bad.get_stress()
    assert close(atoms.get_forces(), expected)
    assert calculator._crew._pool is pool


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (models.REFUSED_BY_ONE, InputError, "one rank refuses"),
        (models.STRAY, InputError, "one collective more"),
        (models.BROKEN, ZeroDivisionError, "the model is broken"),
        (models.GONE, RankLostError, "exit code 7"),
    ],
)
def test_what_one_rank_does_ends_all(
    number: int, kind: type[Exception], said: str, calc: DomainCalculator
) -> None:
    expected = good(calc)
    atoms = with_element(number)
    atoms.calc = calc
    begin = time.monotonic()
    with pytest.raises(kind, match=said) as caught:
        atoms.get_forces()
    assert time.monotonic() - begin < 60
    assert type(caught.value) is kind
    assert calc._crew._pool is not None
    assert not calc._crew._pool.is_open
    assert close(good(calc), expected)  # by new ranks


def test_a_rank_that_hangs(no_orphans: Living) -> None:
    with moody(timeout_s=3.0) as calc:
        atoms = with_element(models.SLOW)
        atoms.calc = calc
        with pytest.raises(DistributedError, match="did not answer within 3 s"):
            atoms.get_forces()
        assert not no_orphans()


def test_loading_is_no_evaluation() -> None:
    """Loading takes longer than this limit."""
    given = {"ranks": 1, "device": "cpu", "timeout_s": 6.0}
    with DomainCalculator("tests.interop.models:slow_to_load", **given) as calc:  # type: ignore[arg-type]
        assert good(calc).shape == (len(bar()), 3)


def test_a_killed_rank(no_orphans: Living) -> None:
    atoms = crystal(2, 1, 1)
    atoms.calc = calc = new_calculator(2)
    expected = atoms.get_forces()
    os.kill(no_orphans()[0], signal.SIGKILL)
    assert close(atoms.get_forces(), expected)  # known already
    atoms.positions[0, 0] += 0.1
    with pytest.raises(RankLostError, match="SIGKILL"):
        atoms.get_forces()
    assert not no_orphans()
    atoms.positions[0, 0] -= 0.1
    assert close(atoms.get_forces(), expected)
    assert len(no_orphans()) == 2
    calc.close()
    calc.close()
    assert not no_orphans()
    assert close(atoms.get_forces(), expected)  # still there
    assert not no_orphans()


@pytest.mark.parametrize(
    ("model", "options", "kind", "said"),
    [
        ("no-such-model", {}, PluginNotFoundError, "no-such-model"),
        ("lj", {"sigm": 1}, InputError, r"no option 'sigm' \(did you mean sigma\?\)"),
        ("lj+lj", {"lj.sigm": 1}, InputError, r"no option 'sigm' \(did you mean sigma\?\)"),
        ("tests.interop.models:Absent", {}, InputError, "Absent"),
    ],
)
def test_a_model_that_cannot_be_made(
    model: str, options: dict[str, int], kind: type[Exception], said: str, no_orphans: Living
) -> None:
    atoms = crystal(2, 1, 1)
    atoms.calc = DomainCalculator(model, ranks=2, device="cpu", options=options)
    with pytest.raises(kind, match=said):
        atoms.get_forces()
    assert not no_orphans()


def test_an_argument_that_it_does_not_have() -> None:
    with pytest.raises(
        InputError, match=r"no argument 'rank' \(did you mean ranks\?\); its arguments: model, r"
    ):
        DomainCalculator("lj", rank=2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"options=\{'epsilon': \.\.\.\}"):
        DomainCalculator("lj", epsilon=0.2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"timeout_s": 0}, "timeout_s is 0: expected a number of seconds"),
        ({"timeout_s": "1"}, "timeout_s is '1'"),
        ({"timeout_s": np.nan}, "timeout_s is nan"),
        ({"skin": "1"}, "skin is '1': expected a finite length"),
        ({"skin": np.nan}, "skin is nan"),
        ({"options": ["sigma"]}, r"options is \['sigma'\]: expected a dictionary"),
        ({"options": {"sigma": lambda: 1}}, "option 'sigma' can't be sent to the processes"),
        ({"model": None}, "model is None: expected a model's name"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        DomainCalculator(**{"model": "lj", **arguments})


def test_the_end_of_the_calculator_is_the_end_of_the_ranks(no_orphans: Living) -> None:
    atoms = crystal(2, 1, 1)
    with new_calculator(1) as calc:
        atoms.calc = calc
        atoms.get_forces()
        assert len(no_orphans()) == 1
    assert not no_orphans()
    atoms.rattle(0.1)
    atoms.get_forces()
    assert len(no_orphans()) == 1
    atoms.calc = None
    del calc  # nothing refers to it any more; no collection is needed
    assert not no_orphans()


PROGRAM = """
import sys, threading, ase.build
from nvdd_core.interop.ase import DomainCalculator
atoms = ase.build.bulk("Ar", "fcc", a=5.26, cubic=True)
atoms.calc = DomainCalculator("lj", ranks={ranks}, device="cpu")
{body}
"""
CALL = 'print(f"{atoms.get_potential_energy():.6f}")'
BODIES = {
    "plain": CALL,
    "thread": f"""
def work():
    {CALL}
thread = threading.Thread(target=work)
thread.start()
thread.join()
""",
    "exit": f"{CALL}\nsys.exit(5)",
    "raise": f"{CALL}\nraise RuntimeError('stop')",
    "global cycle": f"atoms.info['self'] = atoms\natoms.calc.mine = atoms\n{CALL}",
}


def run_python(*args: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        input=text,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    ("how", "body"),
    [
        *(("-c", body) for body in BODIES),
        ("stdin", "plain"),
        ("script", "plain"),
    ],
)
def test_any_kind_of_program(how: str, body: str, tmp_path: Path, no_orphans: Living) -> None:
    text = PROGRAM.format(body=BODIES[body], ranks=2 if how == "script" else 1)
    script = tmp_path / "program.py"
    script.write_text(text)
    args = {"-c": ("-c", text), "stdin": ("-",), "script": (str(script),)}[how]
    done = run_python(*args, text=text if how == "stdin" else None)
    assert done.returncode == {"exit": 5, "raise": 1}.get(body, 0), done.stderr
    assert float(done.stdout) < -0.1
    assert done.stderr.count("Traceback") == (body == "raise"), done.stderr
    assert not no_orphans()


def test_a_program_that_is_killed(no_orphans: Living) -> None:
    done = run_python("-c", PROGRAM.format(body=f"{CALL}\nimport os; os.kill(os.getpid(), 9)", ranks=2))
    assert done.returncode == -signal.SIGKILL
    end = time.monotonic() + 10
    while no_orphans() and time.monotonic() < end:
        time.sleep(0.1)
    assert not no_orphans()


def test_an_interrupted_call(no_orphans: Living) -> None:
    """Ctrl-C while ranks compute: KeyboardInterrupt here, no rank left, and the next call works."""
    with moody() as calc:
        expected = good(calc)
        atoms = with_element(models.SLOW)
        atoms.calc = calc
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        # a shell's background job ignores it
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                atoms.get_forces()
            timer.join()
        finally:
            signal.signal(signal.SIGINT, before)
        assert not no_orphans()
        assert close(good(calc), expected)
