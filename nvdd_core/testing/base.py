"""What every suite is: a class of checks about one subject, which an author describes by class attributes.

Key objects: `Conformance`, `overrides`. Invariant: a standard test that a subclass changes without a reason fails.
Layer: testing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Final, TypeVar

import ase
import torch

from nvdd_core.plugins import PluginStatus, default_manager
from nvdd_core.runtime import Model
from nvdd_core.runtime.source import ModelSource
from nvdd_core.spec import StrategyKind
from nvdd_core.testing.capabilities import Reduced, check_reasons, need
from nvdd_core.testing.distributed_checks import RANKS, claimed_strategies
from nvdd_core.testing.failures import ConformanceError, NotApplicable, check
from nvdd_core.testing.model_checks import usable
from nvdd_core.testing.structures import default_structures
from nvdd_core.testing.tolerances import Tolerance, chosen

F = TypeVar("F", bound=Callable[..., Any])

_OWN: Final = f"{__name__.rpartition('.')[0]}."
_REASONS: dict[Callable[..., Any], str] = {}


def overrides(*, reason: str) -> Callable[[F], F]:
    """Mark a method that replaces a standard test, and say why.

    Raises
    ------
    ConformanceError
        When the reason is empty.
    """
    if not reason.strip():
        raise ConformanceError("overrides(reason=...) needs a reason", "standard-tests-are-kept")

    def mark(function: F) -> F:
        _REASONS[function] = reason
        return function

    return mark


class Subject:
    """What a suite is about: the plugin, its model, and structures made for it; loaded once a class.

    Parameters
    ----------
    suite : Conformance
        Whose attributes say what to load.
    """

    def __init__(self, suite: Conformance) -> None:
        self._suite = suite

    @cached_property
    def source(self) -> ModelSource:
        """Where the model comes from."""
        suite = self._suite
        # of the class: a loader that is read from an instance would be a method of it
        return ModelSource(type(suite).model or self._only_model(), suite.options)

    @cached_property
    def has_model(self) -> bool:
        """Whether there is a model at all; a plugin may offer adapters or specs alone."""
        suite = self._suite
        return bool(suite.model) or bool(suite.plugin and default_manager().plugin(suite.plugin).models)

    def _only_model(self) -> str:
        if not self._suite.plugin:
            raise ConformanceError("set the class attribute `plugin`, `model` or both")
        rows = default_manager().plugin(self._suite.plugin).models
        if len(rows) != 1:
            names = ", ".join(row.decl.name for row in rows) or "none"
            raise NotApplicable(
                f"plugin '{self._suite.plugin}' has these models: {names}; set `model` to one"
            )
        if rows[0].status is PluginStatus.UNAVAILABLE:
            raise NotApplicable(rows[0].reason)
        return f"{self._suite.plugin}/{rows[0].decl.name}"

    @cached_property
    def model(self) -> Model:
        """The model in float64 on the CPU."""
        return self.source.load(torch.float64)

    @cached_property
    def structures(self) -> Mapping[str, ase.Atoms]:
        """The author's structures, or the kit's scaled to the model's cutoff, without those that it can't do."""
        suite = self._suite
        own = suite.structures
        found = (
            default_structures(self.model.cutoff, suite.symbol, suite.spacing) if own is None else dict(own)
        )
        lacking = suite.capabilities.get("open_boundaries", True)
        if isinstance(lacking, Reduced):
            found = {name: atoms for name, atoms in found.items() if bool(atoms.pbc.all())}
        if not found:
            raise ConformanceError("`structures` has none that the model can do; give at least one")
        return found

    @cached_property
    def strategies(self) -> tuple[StrategyKind, ...]:
        """The strategies that are checked: those that the model takes and the author doesn't rule out."""
        taken = [kind for kind, refusal in claimed_strategies(self.model).items() if not refusal]
        limit = self._suite.capabilities.get("strategies", True)
        if isinstance(limit, Reduced):
            taken = [kind for kind in taken if kind.value in limit.values]
        if not taken:
            raise NotApplicable("the model runs under no strategy")
        return tuple(taken)


class Conformance:
    """Base of the suites; an author derives from it once and says what the subject is.

    Attributes
    ----------
    plugin : str
        Name of the installed plugin.
    model : str or callable
        Name of the model, ``"package.module:loader"`` or an importable loader; default the plugin's only model.
    options : mapping
        Options of the loader.
    symbol : str or sequence of str
        Element of the default structures; several take turns.
    spacing : float, optional
        Nearest distance in the default structures, Angstrom; default cutoff / 2.34.
    structures : mapping of str to Atoms, optional
        Structures instead of the default ones; one of them should be periodic and long.
    capabilities : mapping
        What the model can't do: ``{"stress": no("why")}``; names in `CAPABILITIES`.
    tolerances : mapping of str to Tolerance
        Other tolerances, each with a reason.
    ranks : sequence of int
        Numbers of ranks of the distributed checks.
    op_samples : mapping
        Arguments for ``opcheck``, by ``"namespace::name"``: a list of tuples.
    checkpoint : str
        A file of the model's own format, to be loaded with ``weights_only``.
    checkpoint_option : str
        The loader's option that takes such a file.
    """

    plugin: ClassVar[str] = ""
    model: ClassVar[Any] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    symbol: ClassVar[str | Sequence[str]] = "Ar"
    spacing: ClassVar[float | None] = None
    structures: ClassVar[Mapping[str, ase.Atoms] | None] = None
    capabilities: ClassVar[Mapping[str, object]] = {}
    tolerances: ClassVar[Mapping[str, Tolerance]] = {}
    ranks: ClassVar[Sequence[int]] = RANKS
    op_samples: ClassVar[Mapping[str, Sequence[tuple[Any, ...]]]] = {}
    checkpoint: ClassVar[str] = ""
    checkpoint_option: ClassVar[str] = ""

    _subjects: ClassVar[dict[type, Subject]] = {}

    @property
    def subject(self) -> Subject:
        """What this class is about; one a class, so that a model is loaded once."""
        kind = type(self)
        if kind not in self._subjects:
            self._subjects[kind] = Subject(self)
        return self._subjects[kind]

    def tolerance(self, standard: Tolerance) -> Tolerance:
        """Return a standard tolerance, or the author's in its place."""
        return chosen(self.tolerances)[standard.name]

    def need(self, *names: str) -> None:
        """Skip the test when one of these capabilities is missing."""
        need(self.capabilities, *names)

    def small(self, *, periodic: bool = False) -> Iterator[tuple[str, ase.Atoms]]:
        """Yield the small structures by name; with `periodic`, those periodic in all directions."""
        structures = self.subject.structures
        names = usable(structures, periodic=periodic)
        if not names:
            raise NotApplicable("none of the structures is periodic")
        for name in names:
            yield f"'{name}'", structures[name]

    def main(self) -> ase.Atoms:
        """Return the structure for checks that need one: the largest small one."""
        return max((atoms for _, atoms in self.small()), key=len)

    def long(self) -> ase.Atoms:
        """Return the structure that is spread over ranks: the one with most atoms."""
        return max(self.subject.structures.values(), key=len)

    @classmethod
    def teardown_class(cls) -> None:
        """Let go of the model; pytest and the runner call it after the last test of a class."""
        cls._subjects.pop(cls, None)

    # -- the suite itself ------------------------------------------------------------------------------

    @check
    def test_standard_tests_are_kept(self) -> None:
        """No standard test is overridden without `overrides(reason=...)`."""
        for name, standard in standard_tests(type(self)).items():
            found = getattr(type(self), name, None)
            if found is not standard and _REASONS.get(found, "") == "":  # type: ignore[arg-type]
                raise ConformanceError(
                    f"{type(self).__name__}.{name} overrides a standard test without a reason; put "
                    "@overrides(reason='...') above it, or state a capability"
                )

    @check
    def test_reductions_have_reasons(self) -> None:
        """Every reduced capability and every changed tolerance is known and has a reason."""
        check_reasons(self.capabilities)
        chosen(self.tolerances)


def standard_tests(kind: type) -> dict[str, Callable[..., Any]]:
    """Return the tests that the suites of this package bring to a class, in order of definition."""
    found: dict[str, Callable[..., Any]] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith(_OWN):
            found |= {name: value for name, value in vars(base).items() if name.startswith("test_")}
    return found


def override_reasons(kind: type) -> dict[str, str]:
    """Return which standard tests a class overrides, and why."""
    return {
        name: _REASONS.get(getattr(kind, name), "no reason")
        for name, standard in standard_tests(kind).items()
        if getattr(kind, name, None) is not standard
    }
