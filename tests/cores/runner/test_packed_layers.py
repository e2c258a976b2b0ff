"""Packed layers compute what plain ones do, and follow their weights wherever those go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cores.messages import UtilityCall
from cores.runner.packed_layers import (
    PackedLinear,
    can_pack,
    drop_packed_layers,
    join_linears,
    pack_linears,
    repack_layers,
)
from cores.runner.testing import make_tiny_llama
from cores.testing import make_request
from tests.cores.runner.torch_engine import Engine

CPU = torch.device("cpu")
BF16 = torch.bfloat16
PROMPT = [3 + i * 29 % 470 for i in range(40)]

needs_packing = pytest.mark.skipif(not can_pack(CPU, BF16), reason="this CPU or this torch cannot pack bfloat16 weights")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 80), nn.ReLU(), nn.Linear(80, 24, bias=False)).to(BF16).requires_grad_(False)


def packed_of(engine: Engine) -> list[PackedLinear]:
    model: nn.Module = engine.runner._loaded_parts.loaded.model
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


@needs_packing
@pytest.mark.parametrize("shape", [(1, 48), (1, 1, 48), (1, 7, 48), (1, 130, 48), (1, 0, 48)])
def test_a_packed_model_computes_what_the_plain_one_does(shape: tuple[int, ...]) -> None:
    plain, packed = make_model(), make_model()
    pack_linears(packed)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(BF16)
    torch.testing.assert_close(packed(x), plain(x), rtol=2**-7, atol=2**-7)  # one unit in the last place of a sum near 1


@needs_packing
def test_weights_exist_once_and_keep_their_names() -> None:
    model = make_model()
    names = dict(model.named_parameters()).keys()
    pack_linears(model)
    assert dict(model.named_parameters()).keys() == names
    assert all(isinstance(module, PackedLinear) for module in (model[0], model[2]))
    assert all(module.weight.numel() == 0 and module.weight.dtype is BF16 for module in (model[0], model[2]))
    assert (model[0].in_features, model[0].out_features) == (48, 80)


@needs_packing
def test_a_weight_that_another_layer_reads_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 16)
            self.head = nn.Linear(16, 32, bias=False)
            self.head.weight = self.embed.weight

    model = Tied().to(BF16).requires_grad_(False)
    plain = model.head(model.embed(torch.tensor([3])))
    pack_linears(model)
    assert isinstance(model.head, PackedLinear)
    torch.testing.assert_close(model.head(model.embed(torch.tensor([3]))), plain, rtol=2**-7, atol=2**-7)


@needs_packing
def test_what_is_no_plain_linear_layer_is_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(Own(16, 16).to(BF16))
    pack_linears(model)
    assert type(model[0]) is Own


@needs_packing
def test_new_weights_count_once_they_are_packed() -> None:
    model, other = make_model(), make_model()
    pack_linears(model)
    drop_packed_layers(model)
    for name, parameter in model.named_parameters():
        parameter.data = other.get_parameter(name).data * 2
    other[0].weight *= 2
    other[0].bias *= 2
    other[2].weight *= 2
    repack_layers(model)
    x = torch.ones(3, 48, dtype=BF16)
    torch.testing.assert_close(model(x), other(x), rtol=2**-7, atol=2**-7)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(32, 48, bias=False), nn.Linear(32, 16)
        self.to(BF16).requires_grad_(False)


@needs_packing
def test_joined_layers_give_what_each_gives_and_follow_their_weights() -> None:
    plain, joined, x = Attention(), Attention(), torch.randn(5, 32).to(BF16)
    names = dict(joined.named_parameters()).keys()
    pack_linears(joined)
    project = join_linears(joined, "both", [joined.query, joined.key])
    torch.testing.assert_close(project(x), torch.cat((plain.query(x), plain.key(x)), dim=-1), rtol=2**-7, atol=2**-7)
    assert dict(joined.named_parameters()).keys() == names
    assert joined.query.weight.numel() == joined.key.weight.numel() == 0

    drop_packed_layers(joined)
    for name, parameter in joined.named_parameters():
        parameter.data = plain.get_parameter(name).data * 2
    repack_layers(joined)
    torch.testing.assert_close(project(x), torch.cat((plain.query(x), plain.key(x)), dim=-1) * 2, rtol=2**-7, atol=2**-7)


@needs_packing
def test_what_is_not_packed_is_computed_one_by_one() -> None:
    model = Attention()
    project, x = join_linears(model, "both", [model.query, model.key]), torch.randn(5, 32).to(BF16)
    assert torch.equal(project(x), torch.cat((model.query(x), model.key(x)), dim=-1))


@needs_packing
def test_what_follows_a_product_is_computed_with_it() -> None:
    plain, x, other = make_model()[0], torch.randn(7, 48).to(BF16), torch.randn(7, 80).to(BF16)
    packed = PackedLinear(plain, keeps_weight=True)
    packed.pack()
    exact = nn.functional.linear(x.float(), plain.weight.float(), plain.bias.float())
    for got, wanted in (
        (packed.silu(x), nn.functional.silu(exact)),
        (packed.times(x, other), exact * other.float()),
        (packed.plus(x, other), exact + other.float()),
    ):
        torch.testing.assert_close(got, wanted.to(BF16), rtol=2**-7, atol=2**-7)


def test_float32_and_other_devices_are_not_packed() -> None:
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(torch.device("cuda", 0), BF16)


def test_a_float32_engine_has_no_packed_layers(make_engine: Callable[..., Engine]) -> None:
    assert not packed_of(make_engine())


@needs_packing
def test_an_engine_wakes_with_the_weights_that_it_fell_asleep_with_or_was_given(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    def tokens(engine: Engine) -> list[int]:
        return engine.run([make_request(1, PROMPT, max_tokens=12)])[1]

    def call(engine: Engine, method: str, *args: Any) -> None:
        result = engine.core.call_utility(UtilityCall(1, 1, method, args))
        while result is None:
            engine.core.step()
            result = next((late for _, late in engine.core.take_late_results()), None)
        assert result.error is None

    other = make_tiny_llama(tmp_path / "other", seed=1)
    engine, own, new = (
        make_engine(dtype="bfloat16"),
        tokens(make_engine(dtype="bfloat16")),
        tokens(make_engine(other, dtype="bfloat16")),
    )
    assert packed_of(engine)
    call(engine, "sleep", 2)
    assert all(layer._packed is None for layer in packed_of(engine))
    call(engine, "wake_up")
    assert tokens(engine) == own
    call(engine, "update_weights", str(other), 1)
    assert tokens(engine) == new != own
