"""Hooks on chosen submodules of one live model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nvdd_core.adapters import AdapterRegistry, ModuleHookAdapter
from nvdd_core.errors import AdapterConflictError, AdapterError, SpecError
from tests.adapters.foreign import Net
from tests.adapters.replacements import add_one, double_input


def hooks(net: torch.nn.Module) -> dict[str, int]:
    found = {n: len(m._forward_hooks) + len(m._forward_pre_hooks) for n, m in net.named_modules()}
    return {n: k for n, k in found.items() if k}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("embed", ["embed"]),
        ("layers.*", ["layers.0", "layers.1", "layers.2"]),
        ("layers.[1-9]", ["layers.1", "layers.2"]),
        ("layers.?.0", ["layers.0.0", "layers.1.0", "layers.2.0"]),
        ("layers.1**", ["layers.1", "layers.1.0"]),
        (":Linear", ["embed", "layers.0.0", "layers.1.0", "layers.2.0"]),
        (":Seq*", ["layers.0", "layers.1", "layers.2"]),
        ("layers.**:Linear", ["layers.0.0", "layers.1.0", "layers.2.0"]),
        (":Net", [""]),
        ("em*:Module", ["embed"]),
    ],
)
def test_patterns(pattern: str, names: list[str]) -> None:
    net = Net()
    with AdapterRegistry([ModuleHookAdapter(pattern, after=add_one)], root=net) as registry:
        assert hooks(net) == dict.fromkeys(names, 1)
        assert registry.status()[0].target == pattern
    assert hooks(net) == {}


def test_before_and_after_on_one_model() -> None:
    net, other, x = Net(), Net(), torch.randn(3, 2)
    other.load_state_dict(net.state_dict())
    plain = net(x)
    registry = AdapterRegistry([ModuleHookAdapter("embed", double_input, add_one)], root=net)
    for _ in range(2):
        with registry:
            expected = net.embed.weight @ (2 * x).T
            for layer, bias in [(net.embed, 1.0)]:
                torch.testing.assert_close(layer(x), expected.T + bias)
            assert not torch.equal(net(x), plain)
            assert torch.equal(other(x), plain)
        assert torch.equal(net(x), plain)


def test_one_owner_stacks_hooks() -> None:
    net, x = Net(), torch.randn(3, 2)
    plain = net.embed(x)
    one = ModuleHookAdapter("embed", after=add_one)
    two = ModuleHookAdapter("embed", before=double_input)
    with AdapterRegistry([one, two], root=net):
        torch.testing.assert_close(net.embed(x), 2 * plain + 1)
        with AdapterRegistry([one], root=net):  # shared
            torch.testing.assert_close(net.embed(x), 2 * plain + 1)
    assert hooks(net) == {}


def test_an_equal_adapter_with_other_modules_is_no_shared_one() -> None:
    part = torch.nn.Linear(2, 2)
    one, other = (torch.nn.Sequential(part, torch.nn.Linear(2, 2)) for _ in range(2))
    adapter = ModuleHookAdapter(":Linear", after=add_one)
    with AdapterRegistry([adapter], root=one):
        with pytest.raises(AdapterConflictError):
            AdapterRegistry([adapter], root=other).install()
        with AdapterRegistry([adapter], root=part):  # part of what is hooked
            assert hooks(one) == {"0": 1, "1": 1}
    assert hooks(one) == hooks(other) == {}


def test_a_replaced_submodule_is_found_again() -> None:
    net = Net()
    registry = AdapterRegistry([ModuleHookAdapter("layers.1.0", after=add_one)], root=net)
    with registry:
        assert hooks(net) == {"layers.1.0": 1}
    net.layers[1][0] = torch.nn.Linear(2, 2)
    with registry:
        assert hooks(net) == {"layers.1.0": 1}
    assert hooks(net) == {}


@pytest.mark.parametrize("root", [None, Net])
def test_nothing_matches(root: Any) -> None:
    adapter = ModuleHookAdapter("layer.*", after=add_one)
    with pytest.raises(
        AdapterError, match="root=model" if root is None else r"no submodule .*'layer\.\*'.*embed"
    ):
        AdapterRegistry([adapter], root=None if root is None else root()).install()
    if root is None:
        with pytest.raises(AdapterError, match="root=model"):
            adapter.install()


@pytest.mark.parametrize(
    ("args", "text"),
    [(("", add_one), "pattern"), (("a:b:c", add_one), "pattern"), (("embed",), "before or after")],
)
def test_malformed(args: Any, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        ModuleHookAdapter(*args)
