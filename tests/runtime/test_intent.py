"""The verbs outside a run and inside, and adapters of foreign blocks: an unmodified torch module on several ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from nvdd_core.adapters import MethodAdapter, ModuleHookAdapter
from nvdd_core.errors import InputError
from nvdd_core.runtime import (
    SPEC_MPNN_HALO,
    DistributedModel,
    DomainConfig,
    LocalBatch,
    MLIPSpec,
    Scope,
    autograd_target,
    current_dd_context,
    distributed_method,
    localize,
    neighbor_refresh_adapters,
    refresh_neighbors,
    scatter_to_owners,
    system_sum,
    to_local,
)
from nvdd_core.spec import DistributionSpec, HaloStorage, ScatterMode, StrategyKind
from nvdd_core.tensor import ShardTensor
from tests.cases import oracle
from tests.cases.ranks import System, assert_same, evaluate

CRYSTAL = System(*oracle.fcc(3, 3, 3), (True,) * 3)
LOCAL = HaloStorage(scatter=ScatterMode.LOCAL)


# -- outside a run --


def test_verbs_are_the_identity_or_a_plain_sum() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    assert not current_dd_context().is_distributed
    assert refresh_neighbors(x) is x
    assert scatter_to_owners(x) is x
    assert to_local(x) is x
    assert to_local("text") == "text"
    for scope in Scope:
        assert system_sum(x, torch.tensor([0, 1, 1]), 2, scope).tolist() == [[0.0, 1.0], [6.0, 8.0]]


def test_localize_leaves_no_shard_tensor() -> None:
    x = torch.zeros(2, 3)
    data = {"rows": ShardTensor.wrap(x, spec=None), "plain": x, "number": 3}
    found = localize(data)
    assert type(found["rows"]) is torch.Tensor
    assert found["rows"].data_ptr() == x.data_ptr()
    assert found["plain"] is x
    assert found["number"] == 3
    assert isinstance(data["rows"], ShardTensor)  # the caller's own is untouched


def test_autograd_target_is_what_results_depend_on() -> None:
    x = torch.ones(3, dtype=torch.float64)
    target = autograd_target(x)
    assert torch.autograd.grad((x**2).sum(), target)[0].tolist() == [2.0] * 3
    wrapped = ShardTensor.wrap(torch.ones(3, requires_grad=True) * 2, spec=None)
    target = autograd_target(wrapped)
    assert torch.autograd.grad((wrapped**2).sum(), target)[0].tolist() == [4.0] * 3
    with torch.no_grad(), pytest.raises(InputError, match="enable_grad"):
        autograd_target(x)


def test_distributed_method_is_the_original_outside_a_run() -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("called outside a run")

    assert distributed_method(fail)(lambda self, x: (self, x), "me", 2) == ("me", 2)


# -- foreign blocks --


class Block(nn.Module):
    """Sums messages into rows by a means that no handler sees, with a bias after the sum."""

    def forward(
        self, x: torch.Tensor, w: torch.Tensor, edges: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros(x.shape[0], dtype=x.dtype)
        return w, out.index_add(0, edges[1], x[edges[0]] * w) + 0.3


class Foreign(nn.Module):
    """A library's model: two blocks and an energy, without a thought of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, w: torch.Tensor, edges: torch.Tensor, n: int) -> torch.Tensor:
        x = torch.ones(n, dtype=w.dtype)
        for block in self.blocks:
            x = torch.tanh(0.1 * block(x, w, edges)[1])
        return x


class Wrapper:
    """The plugin's model around it."""

    cutoff = 2.5
    dtype = torch.float64
    device = torch.device("cpu")
    outputs = frozenset({"energy", "forces", "stress", "node_energy"})
    layers = 2
    neighbor_form = "full"

    def __init__(self, how: str) -> None:
        self.how = how
        self.module = Foreign()

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        adapters: dict[str, tuple[Any, ...]] = {
            "refresh": neighbor_refresh_adapters(self.module.blocks, output=1),
            "method": (MethodAdapter(Block, "forward", refresh_input),),
            "hook": (ModuleHookAdapter("blocks.*", before=hook),),
        }
        return SPEC_MPNN_HALO | MLIPSpec(
            distribution=DistributionSpec(storage=LOCAL, third_party_helpers=adapters[self.how])
        )

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        pass

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        r2 = batch.edge_vectors().square().sum(1)
        w = torch.where(r2 < self.cutoff**2, (1.0 - r2 / self.cutoff**2) ** 2, torch.zeros_like(r2))
        return {"node_energy": self.module(w, batch.edge_index, batch.n_local)}


@distributed_method
def refresh_input(context: Any, original: Any, block: Any, x: torch.Tensor, *args: Any) -> Any:
    return original(block, refresh_neighbors(x), *args)


def hook(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (refresh_neighbors(args[0]), *args[1:]), kwargs


def make_refresh() -> Wrapper:
    return Wrapper("refresh")


def make_method() -> Wrapper:
    return Wrapper("method")


def make_hook() -> Wrapper:
    return Wrapper("hook")


def run(make: Any, strategy: StrategyKind) -> Any:
    original = Block.__dict__["forward"]
    result = evaluate(make, [CRYSTAL], DomainConfig(strategy=strategy))
    if Block.__dict__["forward"] is not original:
        raise RuntimeError("the class is not as it was")
    return result


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("strategy", list(StrategyKind))
@pytest.mark.parametrize("make", [make_refresh, make_method, make_hook])
def test_foreign_module_is_exact_on_any_number_of_ranks(
    make: Any, strategy: StrategyKind, world: int, rank_pool: Any
) -> None:
    right = run(make, StrategyKind.HALO)
    for found in rank_pool(world).run(run, make, strategy):
        assert_same(found, right, f"{make.__name__} {strategy}", edges=False)


def states(make: Any) -> list[tuple[str, str | None, str]]:
    from tests.cases.ranks import mesh, share

    group = mesh()
    model = DistributedModel(make(), DomainConfig(), group)
    before = [s.state.value for s in model.adapter_status()]
    model(share([CRYSTAL], group))
    return [(before[i], s.plugin, s.state.value) for i, s in enumerate(model.adapter_status())]


def test_status_of_a_models_adapters(rank_pool: Any) -> None:
    for found in rank_pool(2).run(states, make_refresh):
        assert found == [("pending", "tests", "restored")]


def test_refresh_adapters_travel_as_json() -> None:
    spec = Wrapper("refresh").distribution_spec(StrategyKind.HALO)
    again = MLIPSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert "nvdd_core.runtime.refresh:needed_1" in json.dumps(spec.to_dict())


def test_refresh_adapters_want_modules_with_a_forward() -> None:
    with pytest.raises(InputError, match="has no forward"):
        neighbor_refresh_adapters([nn.ModuleList()])


class Derived(nn.Linear):
    """Inherits its forward."""


def test_an_inherited_forward_is_refreshed_once() -> None:
    both = neighbor_refresh_adapters([Derived(1, 1), nn.Linear(1, 1)])
    assert [adapter.full_target for adapter in both] == ["torch.nn.modules.linear:Linear.forward"]
    alone = neighbor_refresh_adapters([Derived(1, 1)])
    assert [adapter.full_target for adapter in alone] == [f"{__name__}:Derived.forward"]
