"""What one command is asked to do: run files and flags, checked before anything heavy is imported.

`EvaluateJob` and `RunJob` are the checked requests of `nvdd evaluate` and `nvdd run`. `read_run_file` reads a
TOML run file, `build` turns plain values into a job and every mistake into one `InputError` that says where the
value came from.

Invariant: nothing here imports torch, numpy or ase, so a mistake is reported at once. Layer: cli.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)

from nvdd_core.errors import InputError
from nvdd_core.plugins.known import suggestion

ENSEMBLES = ("nve", "nvt-langevin")
CAPTURES = ("auto", "on", "off")
STRATEGIES = ("halo", "graph-partition", "wide-halo")
DTYPES = ("float64", "float32")
DEVICES = ("cpu", "cuda")

_PATH_KEYS = ("structure", "output")

_Count = Annotated[StrictInt, Field(ge=1)]
_Every = Annotated[StrictInt, Field(ge=0)]
_Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class JobConfig(BaseModel):
    """What both commands need: a structure, a model and a way to spread it.

    Attributes
    ----------
    structure : Path
        File that ASE can read.
    model : str
        Name that an installed plugin declares.
    option : dict
        Options of the model's loader.
    ranks : int or None
        Number of processes; None means the group found, the grid's size, or 1.
    grid : tuple of three int or None
        Ranks along each cell vector; None means recursive bisection.
    device : str or None
        ``"cpu"`` or ``"cuda"``; None means a GPU where there is one.
    dtype, strategy : str
        Precision of the model, rule of the distribution.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    structure: Path
    model: Annotated[StrictStr, Field(min_length=1)]
    option: dict[str, JsonValue] = {}
    ranks: _Count | None = None
    grid: tuple[_Count, _Count, _Count] | None = None
    device: Literal["cpu", "cuda"] | None = None
    dtype: Literal["float64", "float32"] = "float64"
    strategy: Literal["halo", "graph-partition", "wide-halo"] = "halo"

    @field_validator("grid", mode="before")
    @classmethod
    def _grid_from_text(cls, value: Any) -> Any:
        dims: Any = value
        if isinstance(value, str):
            try:
                dims = tuple(int(part) for part in value.split(","))
            except ValueError:
                dims = ()
        if dims is not None and not (isinstance(dims, (list, tuple)) and len(dims) == 3):
            raise ValueError("expected three whole numbers, as in 2,2,1")
        return dims

    @model_validator(mode="after")
    def _grid_fits(self) -> Self:
        if self.grid is None:
            return self
        if self.strategy == "graph-partition":
            raise ValueError("a grid has no meaning with strategy graph-partition; leave one of them out")
        size = math.prod(self.grid)
        if self.ranks is not None and self.ranks != size:
            shape = " x ".join(str(n) for n in self.grid)
            raise ValueError(f"a grid of {shape} needs {size} ranks, found ranks = {self.ranks}")
        return self

    def inputs(self) -> tuple[Path, str]:
        """Return the file that the work begins with, and what to call it."""
        return self.structure, "structure file"

    def wanted_ranks(self) -> int | None:
        """Return the number of ranks that the job asks for, or None when it leaves that open."""
        return self.ranks if self.grid is None else math.prod(self.grid)


class EvaluateJob(JobConfig):
    """One evaluation: see ``nvdd evaluate --help``.

    Attributes
    ----------
    index : str or None
        ASE's image index; None means the last system, or all of them with `batch`.
    batch : bool
        Evaluate all chosen systems together.
    stress : bool or None
        None means where the system is periodic in all three directions.
    json_path : str or None
        Where the JSON goes; ``"-"`` is standard output, None is a table instead.
    """

    index: Annotated[str, Field(pattern=r"^-?\d+$|^(-?\d+)?:(-?\d+)?(:(-?\d+)?)?$")] | None = None
    batch: StrictBool = False
    stress: StrictBool | None = None
    json_path: str | None = None


class RunJob(JobConfig):
    """One molecular-dynamics run: see ``nvdd run --help``.

    Attributes
    ----------
    ensemble : str
        ``"nve"`` or ``"nvt-langevin"``.
    dt : float
        Time step, fs.
    steps : int
    temperature : float or None
        K. Of the thermostat, and of initial velocities where the file has none.
    friction : float
        Langevin friction, 1/fs.
    seed : int
        Of all random numbers.
    skin : float
        Extra reach of the neighbour lists, Angstrom.
    capture : str
        Whether evaluations are captured in CUDA graphs: ``"auto"``, ``"on"`` or ``"off"``.
    output : Path or None
        Folder for everything that is written; None means ``runs/<name of the structure file>``.
    log_every, trajectory_every, checkpoint_every : int
        Steps between records; 0 turns trajectory or checkpoints off.
    overwrite : bool
        Replace the files of an earlier run in `output`. A flag only, never a key of a run file.
    restart : Path or None
        Checkpoint to go on from, up to step `steps`. A flag only, too.
    """

    ensemble: Literal["nve", "nvt-langevin"] = "nve"
    dt: _Positive = 1.0
    steps: _Every = 1000
    temperature: _NotNegative | None = None
    friction: _Positive = 0.01
    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] = 0
    skin: _NotNegative = 1.0
    capture: Literal["auto", "on", "off"] = "auto"
    output: Path | None = None
    log_every: _Count = 10
    trajectory_every: _Every = 100
    checkpoint_every: _Every = 0
    overwrite: StrictBool = False
    restart: Path | None = None

    @model_validator(mode="after")
    def _thermostat_has_temperature(self) -> Self:
        if self.ensemble == "nvt-langevin" and self.temperature is None:
            raise ValueError("ensemble nvt-langevin needs a temperature (K)")
        return self

    def inputs(self) -> tuple[Path, str]:
        """Return the checkpoint of a restart, else the structure file, and what to call it."""
        return super().inputs() if self.restart is None else (self.restart, "checkpoint")

    def continues(self) -> bool:
        """Return whether this goes on in the folder of the run that wrote the checkpoint, and adds to its files."""
        return self.restart is not None and self.restart.resolve().parent == self.output_folder().resolve()

    def output_folder(self) -> Path:
        """Return the folder that the run writes to."""
        return self.output if self.output is not None else Path("runs") / self.structure.stem


J = TypeVar("J", bound=JobConfig)

_FLAGS_ONLY = {"overwrite", "restart"}
RUN_FILE_KEYS = tuple(key for key in RunJob.model_fields if key not in _FLAGS_ONLY)


def read_run_file(path: Path) -> dict[str, Any]:
    """Read a TOML run file; relative paths in it are taken from the file's folder.

    Raises
    ------
    InputError
        When the file is missing, is not TOML, or holds an unknown key.
    """
    if not path.is_file():
        raise InputError(f"run file {path}: {'is a folder, not a file' if path.is_dir() else 'no such file'}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise InputError(f"run file {path}: not readable as TOML: {exc}") from exc
    for key in values:
        if key not in RUN_FILE_KEYS:
            known = ", ".join(RUN_FILE_KEYS)
            raise InputError(
                f"run file {path}: unknown key '{key}'{suggestion(key, RUN_FILE_KEYS)}; the keys: {known}"
            )
    for key in _PATH_KEYS:
        if isinstance(values.get(key), str):
            values[key] = os.path.normpath(path.parent / values[key])
    return values


def build(kind: type[J], values: Mapping[str, Any], where: Mapping[str, str]) -> J:
    """Check plain values and return the job.

    Parameters
    ----------
    kind : type
        `EvaluateJob` or `RunJob`.
    values : mapping
        Field names to values; a value of None means that it was not given.
    where : mapping
        Field names to the words that name their source in a message (``"--dt"``).

    Raises
    ------
    InputError
        One line that names every mistake and its source.
    """
    given = {key: value for key, value in values.items() if value is not None}
    try:
        return kind.model_validate(given)
    except ValidationError as exc:
        raise InputError("; ".join(_mistake(error, where) for error in exc.errors())) from exc


def _mistake(error: Any, where: Mapping[str, str]) -> str:
    location = [str(part) for part in error["loc"]]
    if not location:  # a rule about several fields; pydantic puts its own words before ours
        return str(error["msg"]).removeprefix("Value error, ")
    name = location[0]
    source = where.get(name, name)
    if error["type"] == "missing":
        return f"no {name} given: pass --{name}"
    inside = f"[{']['.join(location[1:])}]" if len(location) > 1 and name in {"option", "grid"} else ""
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{source}{inside}: {message[:1].lower()}{message[1:]}, found {error['input']!r}"


def run_toml(job: RunJob) -> str:
    """Write a job as a run file that gives the same job when read back (paths absolute)."""
    lines = ["# The resolved configuration of this run; `nvdd run FILE` repeats it."]
    values = job.model_dump(exclude={*_FLAGS_ONLY, "option"}, exclude_none=True)
    values["structure"] = str(job.structure.resolve())
    values["output"] = str(job.output_folder().resolve())
    lines += [f"{key} = {_toml(values[key])}" for key in RUN_FILE_KEYS if key in values]
    if job.option:
        lines += [
            "",
            "[option]",
            *(f"{_toml_key(key)} = {_toml(value)}" for key, value in job.option.items()),
        ]
    return "\n".join(lines) + "\n"


def _toml_key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else json.dumps(key, ensure_ascii=False)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    # A name that the locale could not decode is written as the bytes that it has on disk, which are UTF-8.
    text = str(value).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return json.dumps(text, ensure_ascii=False)
