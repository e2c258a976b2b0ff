"""Adapters in the torch engine: many in one batch, each with the output of the model that its weights are merged into."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cores.lora import LoraError
from cores.request import Request
from cores.runner.interface import ScheduledRequest, SchedulerOutput
from cores.runner.lora import MIN_RUN, LoraModel, RowSegment, cut_row
from cores.runner.lora_adapter import LoraAdapter, LoraWeights
from cores.runner.testing import make_random_lora
from cores.testing import make_request
from tests.cores.runner.torch_engine import Engine

NUM_TOKENS = 12
ALPHA = 16.0

# name: (what is written, the scaling that must come of it)
ADAPTERS: dict[str, tuple[dict[str, Any], Callable[[str], float]]] = {
    "all": ({"rank": 8}, lambda layer: 2.0),
    "attention": ({"rank": 4, "modules": ("q_proj", "v_proj"), "lora_alpha": ALPHA}, lambda layer: ALPHA / 4),
    "stabilized": ({"rank": 16, "use_rslora": True, "lora_alpha": ALPHA}, lambda layer: ALPHA / 4),
    "patterns": (
        {"rank": 8, "rank_pattern": {"down_proj": 3}, "alpha_pattern": {"q_proj": 24}, "lora_alpha": ALPHA},
        lambda layer: ALPHA / 3 if layer.endswith("down_proj") else 24 / 8 if layer.endswith("q_proj") else ALPHA / 8,
    ),
}


@pytest.fixture(scope="session")
def adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths by name."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: str(make_random_lora(root / name, tiny_llama, seed, **written))
        for seed, (name, (written, _)) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Shorter and longer than a run of its own."""
    return [[3 + (n * 7919 + i * i + 13 * i) % 470 for i in range(n)] for n in (1, 7, 33, MIN_RUN + 20)]


@pytest.fixture(scope="session")
def expected(tiny_llama: Path, adapters: dict[str, str], prompts: list[list[int]]) -> dict[str | None, list[list[int]]]:
    """transformers' greedy output by adapter, its weights added to the model's."""
    outputs: dict[str | None, list[list[int]]] = {None: generate(load(tiny_llama), prompts)}
    for name, path in adapters.items():
        model = load(tiny_llama)
        weights, scaling = load_file(Path(path) / "adapter_model.safetensors"), ADAPTERS[name][1]
        for key, a in weights.items():
            if ".lora_A." in key:
                layer = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                model.get_submodule(layer).weight.data += scaling(layer) * (weights[key.replace("lora_A", "lora_B")] @ a)
        outputs[name] = generate(model, prompts)
    assert len({json.dumps(o) for o in outputs.values()}) == 1 + len(adapters), "adapters that change nothing test nothing"
    return outputs


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")


def generate(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=2,
            eos_token_id=None,
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture
def make_lora_engine(tiny_llama: Path, adapters: dict[str, str]) -> Callable[..., Engine]:
    """With all adapters loaded."""

    def make(**settings: Any) -> Engine:
        engine = Engine(tiny_llama, **{"enable_lora": True, "max_loras": 4} | settings)
        for name, path in adapters.items():
            engine.core.loras.add_lora(name, path)
        return engine

    return make


def everything(expected: dict[str | None, list[list[int]]], prompts: list[list[int]]) -> tuple[list[Any], list[list[int]]]:
    """Every prompt with every adapter and without, mixed; and what must come of each."""
    pairs = [(prompt, name) for prompt in range(len(prompts)) for name in expected]
    requests = [make_request(i, prompts[p], max_tokens=NUM_TOKENS, lora_name=name) for i, (p, name) in enumerate(pairs)]
    return requests, [expected[name][p] for p, name in pairs]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="all adapters in one batch"),
        pytest.param({"max_num_batched_tokens": 40}, id="chunked prefill"),
        pytest.param({"max_loras": 2}, id="fewer slots than adapters"),
        pytest.param({"max_loras": 1, "max_num_batched_tokens": 100}, id="one slot"),
        pytest.param({"num_kv_blocks": 30, "block_size": 8, "enable_prefix_caching": False}, id="preemption"),
    ],
)
def test_each_request_gets_the_output_of_the_merged_model(
    make_lora_engine: Callable[..., Engine],
    expected: dict[str | None, list[list[int]]],
    prompts: list[list[int]],
    settings: dict[str, Any],
) -> None:
    engine = make_lora_engine(**settings)
    requests, outputs = everything(expected, prompts)
    assert list(engine.run(requests).values()) == outputs
    assert list(engine.run(requests).values()) == outputs, "with warm prefix caches"
    if "num_kv_blocks" in settings:
        assert engine.core.stats().num_preemptions > 0
    else:
        assert engine.core.stats().prefix_cache_hits > 0


def test_a_sampled_request_goes_on_elsewhere_with_its_adapter_as_it_would_have(make_lora_engine: Callable[..., Engine]) -> None:
    prompt = [3 + i * 29 % 470 for i in range(50)]
    params: dict[str, Any] = {"temperature": 1.2, "top_k": 50, "seed": 7, "max_tokens": 24, "lora_name": "all"}
    alone = make_lora_engine().run([make_request(1, prompt, **params)])[1]
    others = [make_request(i, 5 * i, temperature=1.0, lora_name=list(ADAPTERS)[i % 4]) for i in range(2, 20)]
    assert make_lora_engine(max_num_batched_tokens=128).run([*others, make_request(1, prompt, **params)])[1] == alone
    moved = make_request(9, prompt + alone[:10], num_original_prompt_tokens=len(prompt), **params)
    assert make_lora_engine(max_loras=1).run([moved])[9] == alone[10:]


def test_other_weights_under_an_old_name_find_no_cached_prefix(
    make_lora_engine: Callable[..., Engine],
    adapters: dict[str, str],
    expected: dict[str | None, list[list[int]]],
    prompts: list[list[int]],
) -> None:
    engine = make_lora_engine()
    request = make_request(1, prompts[-1], max_tokens=NUM_TOKENS, lora_name="mine")
    for name in ("all", "attention", "all"):
        engine.core.loras.add_lora("mine", adapters[name])
        assert engine.run([request])[1] == expected[name][-1]
    hits = engine.core.stats().prefix_cache_hits
    assert hits == len(prompts[-1]) // 16 * 16, "the first adapter found its own prefix again, the second none"


def test_a_removed_adapter_is_dropped_with_the_last_request_that_uses_it(
    make_lora_engine: Callable[..., Engine], expected: dict[str | None, list[list[int]]], prompts: list[list[int]]
) -> None:
    engine = make_lora_engine(max_num_seqs=1)
    core = engine.core
    requests = [make_request(i, prompts[1], max_tokens=NUM_TOKENS, lora_name="all") for i in range(2)]
    for request in requests:
        core.add_request(0, request)
    core.step()
    assert core.loras.remove_lora("all") is True
    core.add_request(0, make_request(5, prompts[1], lora_name="all"))
    (outputs,) = core.step().values()
    (refused,) = [f for f in outputs.finished.values() if f.error]
    assert refused.error == ("adapter 'all' is not loaded on this rank; loaded: 'attention', 'stabilized', 'patterns'")
    tokens: list[int] = []
    while core.has_work:
        assert len(engine.lora_ids) == 4
        for outputs in core.step().values():
            tokens += [t for h, t in zip(outputs.handles, outputs.token_ids, strict=True) if h == 1]
    assert tokens == expected["all"][1]
    assert len(engine.lora_ids) == 3
    assert core.loras.remove_lora("all") is False


# --- what cannot be served ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def lora_engine(tiny_llama: Path) -> Engine:
    return Engine(tiny_llama, enable_lora=True, max_lora_rank=8)


def refusal(engine: Engine, path: Path) -> str:
    with pytest.raises(LoraError) as caught:
        engine.core.loras.add_lora("bad", str(path))
    assert engine.core.loras.list_loras() == []
    assert engine.lora_ids == []
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', got 'IA3'"),
        ({"rank": 9}, "its rank 9 is above the limit of 8 (--max-lora-rank)"),
        ({"r": 0}, "r must be a positive number, got 0"),
        ({"r": True}, "r must be a positive number, got True"),
        ({"lora_alpha": "x"}, "lora_alpha must be a positive number, got 'x'"),
        ({"r": 4}, "lora_A of model.layers.0.mlp.down_proj must be [4, 128]: "),
        ({"use_dora": True}, "it is a DoRA adapter (use_dora: True), which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "it replaces whole modules (modules_to_save: ['lm_head']), which is not supported"),
        ({"bias": "all"}, "it trains biases (bias: 'all'), which is not supported"),
        ({"lora_bias": True}, "it has biases of its own (lora_bias: True)"),
        ({"init_lora_weights": "pissa_niter_4"}, "it needs other weights of the model (init_lora_weights: 'pissa_niter_4')"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern: '(' is not a pattern"),
        ({"modules": ("embed_tokens",)}, "the model has no layer 'model.embed_tokens' that adapters can change; there are"),
    ],
)  # fmt: skip
def test_what_an_adapter_asks_for_and_we_cannot_serve_is_refused_by_name(
    lora_engine: Engine, tiny_llama: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    assert message in refusal(lora_engine, make_random_lora(tmp_path, tiny_llama, 0, **config))


Q = "base_model.model.model.layers.1.self_attn.q_proj"
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({B: None}, "lora_B of model.layers.1.self_attn.q_proj is missing"),
        ({A: torch.ones(8, 60)}, "lora_A of model.layers.1.self_attn.q_proj must be [8, 64]"),
        ({B: torch.ones(60, 8)}, "must be [64, 8]: the layer has 64 inputs and 64 outputs"),
        ({A: torch.full((8, 64), torch.inf)}, "q_proj are not finite in float32"),
        ({f"{Q}.lora_magnitude_vector": torch.ones(64)}, "lora_magnitude_vector', which is not the lora_A or"),
        (
            {A.replace("q_proj", "qkv"): torch.ones(8, 64)},
            "no layer 'model.layers.1.self_attn.qkv' that adapters can change; there are model.layers.1.self_attn.q_proj",
        ),
    ],
)
def test_weights_that_do_not_fit_the_model_are_refused_by_layer(
    lora_engine: Engine, tiny_llama: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    path = make_random_lora(tmp_path, tiny_llama, 0)
    weights = load_file(path / "adapter_model.safetensors") | changes
    save_file({key: tensor for key, tensor in weights.items() if tensor is not None}, path / "adapter_model.safetensors")
    assert message in refusal(lora_engine, path)


def test_an_adapter_without_weights_is_refused(lora_engine: Engine, tiny_llama: Path, tmp_path: Path) -> None:
    assert "adapter_model.safetensors is empty" in refusal(lora_engine, make_random_lora(tmp_path, tiny_llama, 0, modules=()))


def test_missing_and_broken_files_are_named(lora_engine: Engine, tiny_llama: Path, tmp_path: Path) -> None:
    assert "does not exist" in refusal(lora_engine, tmp_path / "none")
    path = make_random_lora(tmp_path, tiny_llama, 0)
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(b"not safetensors")
    assert "is not a safetensors file" in refusal(lora_engine, path)
    weights.rename(path / "adapter_model.bin")
    assert "has no adapter_model.safetensors; adapter_model.bin is a pickle" in refusal(lora_engine, path)
    (path / "adapter_config.json").write_text("{")
    weights.write_bytes(b"")
    assert "adapter_config.json is not JSON" in refusal(lora_engine, path)
    (path / "adapter_config.json").unlink()
    assert "has no adapter_config.json" in refusal(lora_engine, path)


# --- the arithmetic -------------------------------------------------------------------------------------------------------


class TwoLayers(torch.nn.Module):
    """The second layer's weights are used without calling it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.called = torch.nn.Linear(24, 40, bias=False, dtype=dtype)
        self.bypassed = torch.nn.Linear(24, 40, bias=False, dtype=dtype)

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.called(x)
        torch.nn.functional.linear(x, self.bypassed.weight)
        return out


def batch_of(runs: Sequence[tuple[str | None, int]]) -> SchedulerOutput:
    scheduled = []
    for i, (lora_id, length) in enumerate(runs):
        request = Request.from_engine_core_request(0, make_request(i, length), 1000, lora_id=lora_id)
        scheduled.append(ScheduledRequest(request, length, samples=True))
    return SchedulerOutput(scheduled, num_decodes=0, num_tokens=sum(length for _, length in runs))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@torch.inference_mode()
def test_each_token_gets_what_its_own_adapter_adds(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    model = TwoLayers(dtype)
    loras = LoraModel(model, max_loras=3, max_rank=8, dtype=dtype, device=torch.device("cpu"))
    with loras.watched():
        model(torch.zeros(1, 1, 24, dtype=dtype))
    for name, rank in (("a", 8), ("b", 3), ("c", 5), ("elsewhere", 8)):
        layer = "bypassed" if name == "elsewhere" else "called"
        weights = {layer: LoraWeights(torch.randn(rank, 24).to(dtype), torch.randn(40, rank).to(dtype) / 8)}
        loras.adapters[name] = LoraAdapter(name, weights)
    for runs in (
        [("a", 1), (None, 1), ("b", 1), ("a", 1), ("c", 1)],
        [("a", 1), ("b", MIN_RUN), ("b", 7), (None, 3), ("c", 2 * MIN_RUN), ("a", 2)],
        [("elsewhere", 4), ("b", 1), ("a", 1)],  # in the slot that c had
        [("a" if i % 2 else "b", 1) for i in range(MIN_RUN + 6)],
        [(None, 5)],
    ):
        x = torch.randn(1, sum(length for _, length in runs), 24).to(dtype)
        with loras.applied(batch_of(runs)):
            out = model(x)[0]
        plain, start = model(x)[0], 0
        for name, length in runs:
            expected = plain[start : start + length].double()
            own = loras.adapters[name].weights.get("called") if name is not None else None
            if own is not None:
                expected = expected + x[0, start : start + length].double() @ own.a.double().T @ own.b.double().T
            torch.testing.assert_close(out[start : start + length].double(), expected, rtol=tolerance, atol=tolerance)
            start += length


def test_a_layer_that_the_model_does_not_call_is_none_that_adapters_can_change(tmp_path: Path) -> None:
    model = TwoLayers(torch.float32)
    loras = LoraModel(model, max_loras=1, max_rank=8, dtype=torch.float32, device=torch.device("cpu"))
    with loras.watched():
        model(torch.zeros(1, 1, 24))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    weights = {f"bypassed.lora_{half}.weight": torch.ones(shape) for half, shape in (("A", (2, 24)), ("B", (40, 2)))}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    with pytest.raises(LoraError, match="the model has no layer 'bypassed' that adapters can change; there are called"):
        loras.load(str(tmp_path))


# --- how a row is cut -----------------------------------------------------------------------------------------------------


def test_long_runs_stand_alone_and_short_ones_between_them_together() -> None:
    decodes = [(0, 1), (None, 1), (2, 1)]
    assert cut_row([*decodes, (1, 100), (1, 20), (0, 5), (None, 3), (2, 5), (None, 100), (None, 4)]) == [
        RowSegment(0, [0, None, 2]),
        RowSegment(3, [1] * 120),
        RowSegment(123, [0] * 5 + [None] * 3 + [2] * 5),
    ]


def test_rows_without_adapters_are_in_no_segment() -> None:
    assert cut_row([(None, 1)] * 5 + [(None, 200)]) == []
    assert cut_row([(None, 3), (None, 200), (1, 1)]) == [RowSegment(203, [1])]
