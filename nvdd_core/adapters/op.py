"""`OpAdapter`: makes an opaque kernel (a custom op of torch) work on rows that are spread over ranks.

The adapter says by position which inputs are gathered or sliced before the kernel and which outputs are exchanged
or summed after it. Installed, it serves the op's calls with a ShardTensor by a handler, and calls with plain tensors
inside `intercept_plain_calls` by a torch function mode, since most operations on a ShardTensor give plain tensors. The
kernel itself always runs on plain tensors.

Invariants: without ShardTensors and outside `intercept_plain_calls` the op runs untouched; a position names the same
argument whether it is passed by place or by keyword.
Layer: adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch._ops import OpOverload, OpOverloadPacket

from nvdd_core.adapters.base import Adapter, Patch
from nvdd_core.adapters.op_patch import OpPatch
from nvdd_core.adapters.transforms import (
    ARG_TRANSFORMS,
    OUTPUT_TRANSFORMS,
    AllReduceSum,
    ArgTransform,
    GatherInputs,
    GatherInputsFull,
    OutputTransform,
    ScatterOutputs,
    SliceOutputsOwned,
    SliceOwned,
    Transform,
    read_transform,
)
from nvdd_core.errors import AdapterError, SpecError
from nvdd_core.plugins.rows import AdapterKind
from nvdd_core.spec import FrozenMap

X = TypeVar("X", bound=Transform)
Positions = Iterable[int]

_OP_NAME = re.compile(r"[^\W\d]\w*::[^\W\d]\w*(\.[^\W\d]\w*)?")


@dataclass(frozen=True, init=False)
class OpAdapter(Adapter):
    """Distributes a custom op by transforms of its inputs and outputs.

    Parameters
    ----------
    op : OpOverload, OpOverloadPacket, CustomOpDef or str
        The op, ``"ns::name"`` for all its overloads or ``"ns::name.overload"``; looked up when installed.
    arg_transforms : mapping of int to GatherInputs, GatherInputsFull or SliceOwned, optional
        By position of the input in the op's schema.
    output_transforms : mapping of int to ScatterOutputs, AllReduceSum or SliceOutputsOwned, optional
        By position of the output.
    gather_inputs, neighbors_inputs : positions
        Inputs whose ghost rows the kernel reads: `GatherInputs`.
    gather_inputs_full, owned_slice_inputs : positions
        `GatherInputsFull`, `SliceOwned`.
    scatter_outputs, all_reduce_outputs, slice_outputs_owned : positions
        `ScatterOutputs`, `AllReduceSum`, `SliceOutputsOwned`.
    all_reduce_replicated_outputs : positions
        ``AllReduceSum(replicated=True)``; may, but need not, be named in `all_reduce_outputs` as well.
    install_site : str
        Where this was written.

    Attributes
    ----------
    op : str
    arg_transforms, output_transforms : mapping

    Raises
    ------
    SpecError
        When an argument is malformed or a position has two roles.
    """

    kind: ClassVar[str] = AdapterKind.OP.value

    op: str
    arg_transforms: Mapping[int, ArgTransform]
    output_transforms: Mapping[int, OutputTransform]
    install_site: str = field(compare=False)

    def __init__(
        self,
        op: Any,
        arg_transforms: Mapping[int, ArgTransform] | None = None,
        output_transforms: Mapping[int, OutputTransform] | None = None,
        *,
        gather_inputs: Positions = (),
        neighbors_inputs: Positions = (),
        gather_inputs_full: Positions = (),
        owned_slice_inputs: Positions = (),
        scatter_outputs: Positions = (),
        all_reduce_outputs: Positions = (),
        slice_outputs_owned: Positions = (),
        all_reduce_replicated_outputs: Positions = (),
        install_site: str = "",
    ) -> None:
        name = op_text(op)
        replicated = tuple(all_reduce_replicated_outputs)
        shares = [p for p in all_reduce_outputs if p not in replicated]
        inputs = _roles(
            f"OpAdapter({name}), input",
            ARG_TRANSFORMS,
            [
                (arg_transforms or {}).items(),
                ((p, GatherInputs()) for p in dict.fromkeys([*gather_inputs, *neighbors_inputs])),
                ((p, GatherInputsFull()) for p in gather_inputs_full),
                ((p, SliceOwned()) for p in owned_slice_inputs),
            ],
        )
        outputs = _roles(
            f"OpAdapter({name}), output",
            OUTPUT_TRANSFORMS,
            [
                (output_transforms or {}).items(),
                ((p, ScatterOutputs()) for p in scatter_outputs),
                ((p, AllReduceSum()) for p in shares),
                ((p, AllReduceSum(replicated=True)) for p in replicated),
                ((p, SliceOutputsOwned()) for p in slice_outputs_owned),
            ],
        )
        object.__setattr__(self, "op", name)
        object.__setattr__(self, "arg_transforms", inputs)
        object.__setattr__(self, "output_transforms", outputs)
        object.__setattr__(self, "install_site", install_site)

    @property
    def target(self) -> str:
        """The op's name."""
        return self.op

    @property
    def full_target(self) -> str:
        """The target in full, as text."""
        return self.op

    @property
    def all_reduce_replicated_outputs(self) -> tuple[int, ...]:
        """Outputs whose sum feeds the same computation on every rank."""
        return tuple(p for p, t in self.output_transforms.items() if t == AllReduceSum(replicated=True))

    def resolve(self, root: torch.nn.Module | None = None) -> Patch:
        """Find the live target; see `Adapter.resolve`."""
        return OpPatch(self.op, _overloads(self.op), dict(self.arg_transforms), dict(self.output_transforms))

    def _written(self, name: str) -> Any:
        if name.endswith("_transforms"):
            return {str(position): t.to_dict() for position, t in getattr(self, name).items()}
        return super()._written(name)

    @classmethod
    def _read(cls, body: dict[str, Any]) -> dict[str, Any]:
        for key, known in (("arg_transforms", ARG_TRANSFORMS), ("output_transforms", OUTPUT_TRANSFORMS)):
            written = body.get(key, {})
            where = f"OpAdapter.{key}"
            if not isinstance(written, Mapping) or not all(str(p).isdecimal() for p in written):
                raise SpecError(f"{where}: expected an object with positions as keys, found {written!r}")
            read = {int(p): read_transform(t, known, f"{where}[{p}]") for p, t in written.items()}
            body = {**body, key: read}
        return body


def op_text(op: Any) -> str:
    """Return the name of an op, ``"ns::name"`` or ``"ns::name.overload"``.

    Raises
    ------
    SpecError
        When `op` is no op.
    """
    if isinstance(op, OpOverload):
        return f"{op._schema.name}.{op._overloadname}"
    if isinstance(op, OpOverloadPacket):
        return str(op._qualified_op_name)
    text = op if isinstance(op, str) else getattr(op, "_qualname", None)  # a CustomOpDef
    if isinstance(text, str) and _OP_NAME.fullmatch(text):
        return text
    raise SpecError(
        f"OpAdapter.op: expected a custom op such as torch.ops.ns.name, or 'ns::name[.overload]', found {op!r}"
    )


def _roles(
    where: str, known: Mapping[str, type[X]], roles: list[Iterable[tuple[int, Any]]]
) -> Mapping[int, X]:
    """Return the transforms by position; each position has one."""
    found: dict[int, X] = {}
    for position, transform in (pair for role in roles for pair in role):
        if not isinstance(position, int) or isinstance(position, bool) or position < 0:
            raise SpecError(f"{where} {position!r}: expected a position, counted from 0")
        if not isinstance(transform, tuple(known.values())):
            names = ", ".join(t.__name__ for t in known.values())
            raise SpecError(f"{where} {position}: expected one of {names}, found {transform!r}")
        if found.setdefault(position, cast("X", transform)) != transform:
            raise SpecError(f"{where} {position}: has two roles, {found[position]} and {transform}; name one")
    # FrozenMap is typed for names and serves positions as well
    return cast("Mapping[int, X]", FrozenMap(cast("dict[str, X]", dict(sorted(found.items())))))


def _overloads(name: str) -> tuple[OpOverload, ...]:
    """Return the live overloads that `name` stands for.

    Raises
    ------
    AdapterError
        When there is no such op yet.
    """
    qualified, _, overload = name.partition(".")
    namespace, _, short = qualified.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short, None)
    if packet is None:
        raise AdapterError(
            f"OpAdapter({name}): no op of this name is registered; import the module that defines it before the "
            "adapter is installed, and check namespace and name"
        )
    known = packet.overloads()
    if overload and overload not in known:
        raise AdapterError(f"OpAdapter({name}): the op has no such overload; it has {', '.join(known)}")
    return tuple(getattr(packet, o) for o in ([overload] if overload else known))
