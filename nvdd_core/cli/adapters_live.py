"""The scratch process of `nvdd adapters --live`: installs adapters one after the other, and puts everything back.

Run as ``python -m nvdd_core.cli.adapters_live ORDER JOURNAL``. Foreign code may end the process at any point, so
each step is written to the journal before it begins, together with the row that holds if it never ends, and
again when it is over. The parent starts a new process for the steps that were not reached.

Key objects: `Journal`, `Trial`. Invariant: a step that the order names as done is not done again. Layer: cli.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from nvdd_core.adapters import Adapter, AdapterRegistry
from nvdd_core.cli.config import EvaluateJob
from nvdd_core.cli.session import load_model
from nvdd_core.errors import AdapterError, NvddError
from nvdd_core.plugins import (
    AdapterDecl,
    AdapterKind,
    PluginManager,
    PluginRecord,
    PluginStatus,
    Provided,
    Ref,
    SpecDecl,
    default_manager,
    report,
)
from nvdd_core.plugins.foreign import error_text
from nvdd_core.runtime import MLIPSpec
from nvdd_core.runtime.model_adapters import root_module
from nvdd_core.spec import StrategyKind

T = TypeVar("T")
FINISHED: Final = "finished"


class Journal:
    """What has been begun and what has been found out, one JSON line each, on disk before the next step begins."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, step: str, *, over: bool, row: report.Json | None = None, note: str = "") -> None:
        """Add a line.

        Parameters
        ----------
        step
            Its name; for a row, the row's.
        over
            Whether the step is over.
        row
            The adapter's row as it is now.
        note
            Something worth telling.
        """
        line = json.dumps({"step": step, "over": over, "row": row, "note": note})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


@dataclass
class Trial:
    """The adapters of one model, tried in turn.

    Parameters
    ----------
    manager
        Where the plugins are.
    model, options
        The model, and what its loader is given should an adapter need the model itself.
    done
        Steps of earlier processes, each with what became of the adapter.
    journal
        Where results go.
    """

    manager: PluginManager
    model: str
    options: Mapping[str, Any]
    done: Mapping[str, str | None]
    journal: Journal
    _good: list[Adapter] = field(default_factory=list)
    _seen: list[Adapter] = field(default_factory=list)
    _root: torch.nn.Module | None = None
    _root_asked: bool = False
    _own: list[Adapter] | None = None

    def run(self) -> None:
        """Try what the plugin declares, then what its spec holds, then all of it together."""
        model = self.manager.provided_model(self.model)
        record = self.manager.plugin(model.plugin)
        # As in a run, the module of the loader comes first: importing it registers the ops that adapters name.
        self._step(f"importing {model.decl.ref}", lambda: self.manager.resolve(model.decl.ref, record.name))
        for provided in record.adapters:
            row = report.adapter_row(record, provided)
            if provided.status is PluginStatus.OK:
                for candidate in self._imported(row, provided.decl.ref):
                    self._try(*candidate)
            else:
                self.journal.write(row["name"], over=True, row=row)
        decl = self._spec_decl(record)
        if decl is not None:
            found = self._step(f"importing {decl.ref}", lambda: self._of_spec(record, decl))
            for row, adapter in found or ():
                # A spec usually holds the declared ones; what is left is what nobody would see in a listing.
                if not any(_equal(adapter, other) for other in self._seen):
                    self._try(row, adapter)
        if len(self._good) > 1:
            self._step("all adapters together", self._together)
        self.journal.write(FINISHED, over=True)

    # -- where adapters come from --

    def _imported(self, row: report.Json, ref: Ref) -> list[tuple[report.Json, Adapter]]:
        """Import what a row names; one adapter keeps the row's name, several are numbered."""
        step = f"importing {row['name']}"
        if self.done.get(step) == "failed":
            return []
        self.journal.write(step, over=False, row=row | {"runtime": "failed"})
        try:
            found = self.manager.resolve(ref, row["plugin"])
            adapters = found if isinstance(found, tuple | list) else (found,)
            for adapter in adapters:
                _expect_adapter(adapter, ref)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # foreign code raises what it likes
            self.journal.write(step, over=True, row=row | {"runtime": "failed", "error": _told(error)})
            return []
        self.journal.write(step, over=True)
        if adapters is not found:
            return [(row, adapters[0])]
        return [(row | {"name": f"{row['name']}.{i}"}, adapter) for i, adapter in enumerate(adapters)]

    def _spec_decl(self, record: PluginRecord) -> SpecDecl | None:
        """Return the declaration of the model's spec: its plugin's, or a preset of the core."""
        name = self.manager.provided_model(self.model).decl.spec
        if name is None:
            return None
        own = [row.decl for row in record.specs if row.decl.name == name]
        return own[0] if own else self.manager.spec(name)

    def _of_spec(self, record: PluginRecord, decl: SpecDecl) -> list[tuple[report.Json, Adapter]]:
        """Import a spec and return its adapters, each with a row as if it had been declared."""
        spec = self.manager.resolve(decl.ref, record.name)
        if not isinstance(spec, MLIPSpec):
            raise AdapterError(f"{decl.ref} is no MLIPSpec but {spec!r}")
        found: list[tuple[report.Json, Adapter]] = []
        for field_name in ("custom_ops", "third_party_helpers"):
            for i, adapter in enumerate(getattr(spec.distribution, field_name)):
                _expect_adapter(adapter, decl.ref)
                name = f"{record.name}/{decl.name}.{field_name}.{i}"
                row = AdapterDecl(name, str(adapter.kind), adapter.describe().target, decl.ref)
                provided = Provided(row, record.name, record.entry.distribution)
                found.append((report.adapter_row(record, provided), adapter))
        return found

    # -- trying --

    def _try(self, row: report.Json, adapter: Adapter) -> None:
        """Try one adapter, unless an earlier process has."""
        self._seen.append(adapter)
        name = row["name"]
        if state := self.done.get(name):
            self._good += [adapter] if state == "restored" else []
            return
        if row["kind"] != adapter.kind:
            note = f"{name} is declared as {row['kind']}, but it is an adapter of kind {adapter.kind}"
            self.journal.write(f"kind of {name}", over=True, note=note)
        status = adapter.describe().to_dict()
        row = row | {key: status[key] for key in ("kind", "target", "install_site")}
        if adapter.kind == AdapterKind.MODULE:
            state = "pending" if self._live_root() is None else "" if self._in_use(adapter) else "unused"
            if state:
                self.journal.write(name, over=True, row=row | {"runtime": state})
                return
        self.journal.write(name, over=False, row=row | {"runtime": "failed"})
        statuses = self._install_and_restore(row, adapter)
        last = statuses[-1]
        if last["state"] == "restored":
            self._good.append(adapter)
        row = row | {"runtime": last["state"], "error": last["error"], "statuses": statuses}
        self.journal.write(name, over=True, row=row)

    def _install_and_restore(self, row: report.Json, adapter: Adapter) -> list[report.Json]:
        """Return the adapter's states, as JSON: installed, then restored; or failed."""
        states: list[report.Json] = []
        try:
            registry = AdapterRegistry(owner="nvdd adapters", root=self._root)
            registry.add(adapter, name=row["name"], plugin=row["plugin"])
            registry.install()
            states += [status.to_dict() for status in registry.status()]
            registry.restore()
            states += [status.to_dict() for status in registry.status()]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # foreign code raises what it likes
            failed = adapter.describe(state="failed", error=_told(error)).to_dict()
            states.append(failed | {"name": row["name"], "plugin": row["plugin"]})
        return states

    def _together(self) -> None:
        """Install all at once, as an evaluation does; two may want the same target."""
        hooks = any(adapter.kind == AdapterKind.MODULE for adapter in self._good)
        root = self._live_root() if hooks else None  # loaded anew when another process tried the hooks
        with AdapterRegistry(self._good, owner="nvdd adapters", root=root):
            pass

    def _live_root(self) -> torch.nn.Module | None:
        """Load the model, once, for adapters that hang on to a live module."""
        if not self._root_asked:
            self._root_asked = True
            self._root = self._step(f"loading the model '{self.model}'", self._load)
        return self._root

    def _load(self) -> torch.nn.Module:
        job = EvaluateJob(structure=Path("-"), model=self.model, option=dict(self.options))
        model: object = load_model(job, torch.device("cpu"))
        root = root_module(model)
        if root is None:
            raise AdapterError(f"{type(model).__name__} is no torch.nn.Module and has none as its 'module'")
        self._own = _of_model(model)
        return root

    def _in_use(self, adapter: Adapter) -> bool:
        """Whether the loaded model's own specs hold an adapter; a plugin declares those of all its models."""
        return self._own is None or any(_equal(adapter, own) for own in self._own)

    def _step(self, what: str, act: Callable[[], T]) -> T | None:
        """Do something that is no adapter's own; if it fails, or has ended a process before, say so in a note."""
        if self.done.get(what) == "failed":
            return None
        self.journal.write(what, over=False)
        try:
            result = act()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # foreign code raises what it likes
            self.journal.write(what, over=True, note=f"{what}: {_told(error)}")
            return None
        self.journal.write(what, over=True)
        return result


def _expect_adapter(value: object, ref: Ref) -> None:
    if not isinstance(value, Adapter):
        raise AdapterError(f"{ref} is no adapter of nvdd_core.adapters but {value!r}")


def _of_model(model: object) -> list[Adapter] | None:
    """Return the adapters of a loaded model's specs under every strategy; None where it has no specs."""
    declared = getattr(model, "distribution_spec", None)
    if declared is None:
        return None
    found: list[Adapter] = []
    for strategy in StrategyKind:
        try:
            distribution = declared(strategy).distribution
        except NvddError:  # it refuses this strategy
            continue
        found += [*distribution.custom_ops, *distribution.third_party_helpers]
    return found


def _equal(one: Adapter, other: Adapter) -> bool:
    try:
        return bool(one == other)
    except Exception:  # a value of an array type has no single answer
        return one is other


def _told(error: BaseException) -> str:
    """Say in one line what went wrong; errors of ours say it themselves."""
    text = error_text(error)
    return text if isinstance(error, AdapterError) and text else f"{type(error).__name__}: {text}"


def main(order_file: str, journal_file: str) -> None:
    """Carry out the order in one file, and keep the journal in the other."""
    order = json.loads(Path(order_file).read_text(encoding="utf-8"))
    Trial(
        default_manager(), order["model"], order["options"], order["done"], Journal(Path(journal_file))
    ).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
