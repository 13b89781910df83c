"""`DomainCalculator`: any model of nvdd, spread over processes or GPUs, as a calculator of ASE.

The program that makes it stays one ordinary process, so relaxations, NEB, phonons and dynamics of ASE run unchanged;
the ranks are a pool of workers of the calculator's own.

Invariant: atoms are read, never changed; a result is given again only for what is the same to the last bit.
Layer: interop.
"""

from __future__ import annotations

import inspect
import json
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Never

import ase
import numpy as np
import torch
from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes
from ase.stress import full_3x3_to_voigt_6_stress

from nvdd_core.errors import InputError
from nvdd_core.interop.crew import Crew, Results, Settings
from nvdd_core.interop.snapshot import Snapshot
from nvdd_core.plugins import default_manager
from nvdd_core.plugins.composition import is_composition
from nvdd_core.plugins.known import suggestion
from nvdd_core.plugins.options import placed_options
from nvdd_core.runtime import DomainConfig, Model
from nvdd_core.runtime.source import ModelSource
from nvdd_core.spec import StrategyKind

_DTYPES = {"float64": torch.float64, "float32": torch.float32}


class ResultMissingError(PropertyNotImplementedError):
    """The model, or the structure, has no such result; ASE's writers leave it out then."""


class DomainCalculator(Calculator):
    """An ASE calculator whose model runs on several processes of this machine.

    The processes start at the first evaluation and end with the calculator: by `close`, at the end of a ``with``
    block, when nothing refers to it any more, or with the program. Between calls they keep their share of the
    atoms, so a call sends new positions and no more; neighbour lists are kept until an atom has moved half the skin.
    Copies, by pickle too, start processes of their own.

    Parameters
    ----------
    model : str or callable
        An installed model, ``"package.module:factory"``, ``"path/file.py:factory"``, or a callable that can be
        imported; or several of the first two, ``"one+0.5*other"``. It is called with ``dtype``, ``device`` and
        `options`, as far as it takes them.
    ranks : int, optional
        Processes. Default: one on the CPU, on GPUs one for each.
    device : str
        ``"cpu"``, ``"cuda"``, or ``"auto"``: GPUs where there are any.
    dtype : str
        ``"float64"`` or ``"float32"``, for the model; results are float64.
    strategy : str or StrategyKind
    skin : float
        Angstrom. A larger one makes lists longer and rebuilds rarer.
    options : mapping, optional
        Further arguments of the model; of several, ``"one.option"`` is for one of them.
    config : DomainConfig, optional
        Cutoff, grid, ghost width; its skin and strategy give way to those given here.
    timeout_s : float
        Time limit of one evaluation, seconds; starting and loading have at least 300 each.

    Attributes
    ----------
    n_evaluations : int
        Evaluations so far; asking again for what is known is none.
    n_rebuilds : int
        Times that the running processes spread atoms anew and listed neighbours.
    evaluation_s : float
        Seconds that the last evaluation took in the processes, without the way there and back.

    Raises
    ------
    InputError
        When an argument makes no sense.
    """

    implemented_properties: ClassVar[list[str]] = ["energy", "forces", "stress", "energies", "free_energy"]
    nolabel = True

    def __init__(
        self,
        model: str | Callable[..., Model],
        *,
        ranks: int | None = None,
        device: str = "auto",
        dtype: str = "float64",
        strategy: str | StrategyKind = StrategyKind.HALO,
        skin: float = 1.0,
        options: Mapping[str, Any] | None = None,
        config: DomainConfig | None = None,
        timeout_s: float = 600.0,
        **unknown: Never,
    ) -> None:
        super().__init__()
        for name in unknown:
            raise InputError(_no_argument(name))
        # ASE puts a bound method of the calculator into the calculator, a cycle that would keep the processes alive
        # until the next garbage collection.
        self.__dict__.pop("get_spin_polarized", None)
        if dtype not in _DTYPES:
            raise InputError(f"dtype is {dtype!r}: expected {' or '.join(_DTYPES)}")
        device = _device(device)
        n_ranks = _ranks(ranks, device)
        domain = replace(config or DomainConfig(), skin=skin, strategy=_strategy(strategy))
        source = _absolute(ModelSource.of(model, _travelling(options)).by_name())
        self._settings = Settings(source, n_ranks, device, _DTYPES[dtype], domain, _seconds(timeout_s))
        self.parameters.update(
            model=source.name,
            options=json.loads(json.dumps(source.options, default=str, skipkeys=True)),
            ranks=n_ranks,
            device=device,
            dtype=dtype,
            strategy=domain.strategy.value,
            skin=skin,
        )
        self.n_evaluations = 0
        self._seen: Snapshot | None = None
        self._prepare()

    def _prepare(self) -> None:
        """Make what belongs to this process and isn't copied."""
        self._lock = threading.RLock()
        self._crew = Crew(self._settings)

    # -- what ASE calls --------------------------------------------------------------------------------------

    def get_property(self, name: str, atoms: ase.Atoms | None = None, allow_calculation: bool = True) -> Any:
        """Return a result, evaluating only if something changed; threads take turns.

        Raises
        ------
        PropertyNotImplementedError
            When model or structure have no such result.
        InputError, NumericalError
            When the structure can't be evaluated.
        DistributedError
            When a process died or didn't answer; the next call starts new ones.
        """
        with self._lock:
            return super().get_property(name, atoms, allow_calculation)

    def check_state(self, atoms: ase.Atoms, tol: float = 0.0) -> list[str]:
        """Return what has changed since the last evaluation; `tol` is ignored, as any change counts."""
        return list(all_changes) if self._seen is None else self._seen.changes(atoms)

    def calculate(
        self,
        atoms: ase.Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = tuple(all_changes),
    ) -> None:
        """Evaluate `atoms` for everything that the model gives, and keep it as ``results``."""
        with self._lock:
            atoms = self.atoms if atoms is None else atoms
            if atoms is None:
                raise InputError("the calculator has no atoms yet: ask through an Atoms object")
            if system_changes or not self.results:
                self._evaluate(atoms)
            for name in properties:
                if name not in self.results:
                    raise ResultMissingError(self._lacks(name))

    def reset(self) -> None:
        """Forget all results; the processes stay."""
        super().reset()
        self._seen = None

    def set(self, **changes: Any) -> dict[str, Any]:
        """Refuse changes: a calculator stays what it is.

        Raises
        ------
        InputError
            When anything is to be changed.
        """
        if changes:
            raise InputError(
                f"{', '.join(changes)} of a DomainCalculator can't be changed; make another calculator"
            )
        return {}

    def _evaluate(self, atoms: ase.Atoms) -> None:
        self.reset()
        seen, copy = Snapshot.of(atoms), atoms.copy()
        found = self._crew.evaluate(atoms, seen)
        self.n_evaluations += 1
        self.atoms, self.results, self._seen = copy, _named(found), seen

    def _lacks(self, name: str) -> str:
        if name == "stress" and "stress" in self._crew.outputs:
            return "stress needs three cell vectors that span a volume; this structure has none"
        return f"model '{self._settings.source.name}' gives no {name}"

    def _get_name(self) -> str:
        return "nvdd"

    # -- the processes -------------------------------------------------------------------------------------------

    @property
    def n_rebuilds(self) -> int:
        """Times that the running processes spread atoms anew and listed neighbours."""
        return self._crew.n_rebuilds

    @property
    def evaluation_s(self) -> float:
        """Seconds that the last evaluation took in the processes, without the way there and back."""
        return self._crew.seconds

    def close(self) -> None:
        """End the processes; results stay, and another evaluation starts new ones."""
        with self._lock:
            self._crew.close()

    def __enter__(self) -> DomainCalculator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one process: the pool, its pipes and the lock."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_crew", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()


def _named(found: Results) -> dict[str, Any]:
    """Return results by ASE's names and in its forms."""
    stress = None if found.stress is None else full_3x3_to_voigt_6_stress(found.stress)
    named = {
        "energy": found.energy,
        "free_energy": found.energy,
        "forces": found.forces,
        "stress": stress,
        "energies": found.node_energy,
    }
    return {name: value for name, value in named.items() if value is not None}


def _no_argument(name: str) -> str:
    known = [key for key in inspect.signature(DomainCalculator).parameters if key != "unknown"]
    return (
        f"DomainCalculator has no argument '{name}'{suggestion(name, known)}; its arguments: {', '.join(known)}. An "
        f"option of the model goes into options={{'{name}': ...}}"
    )


def _device(device: str) -> str:
    if device not in ("cpu", "cuda", "auto"):
        raise InputError(f"device is {device!r}: expected cpu, cuda or auto")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda was asked for, but this machine has no GPU that torch can use")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _ranks(ranks: int | None, device: str) -> int:
    if ranks is None:
        return torch.cuda.device_count() if device == "cuda" else 1
    if isinstance(ranks, bool) or not isinstance(ranks, int | np.integer) or ranks < 1:
        raise InputError(f"ranks is {ranks!r}: expected a whole number above zero")
    return int(ranks)


def _seconds(timeout_s: object) -> float:
    if not (isinstance(timeout_s, Real) and float(timeout_s) > 0):
        raise InputError(f"timeout_s is {timeout_s!r}: expected a number of seconds above zero")
    return float(timeout_s)


def _travelling(options: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Refuse now what processes could not be given later."""
    if options is not None and not isinstance(options, Mapping):
        raise InputError(f"options is {options!r}: expected a dictionary of the model's options")
    for name, value in (options or {}).items():
        try:
            pickle.dumps(value)
        except Exception as exc:  # an object of the user's may refuse in any way
            raise InputError(f"option '{name}' can't be sent to the processes: {exc}") from exc
    return options


def _strategy(strategy: str | StrategyKind) -> StrategyKind:
    try:
        return StrategyKind(str(strategy).replace("-", "_"))  # the command line writes wide-halo
    except ValueError as exc:
        known = ", ".join(kind.value.replace("_", "-") for kind in StrategyKind)
        raise InputError(f"strategy is {strategy!r}: expected one of {known}") from exc


def _absolute(source: ModelSource) -> ModelSource:
    """Return the source with paths of files as they read from any folder: the processes start later."""
    where, colon, attribute = source.target.rpartition(":")
    if not colon or is_composition(source.target):
        return replace(source, options=placed_options(default_manager(), source.target, source.options))
    if not where.endswith(".py"):
        return source
    return replace(source, target=f"{Path(where).resolve()}{colon}{attribute}")
