"""Embedding models: vectors equal those of transformers, one prompt at a time, however a step's prompts are batched or cut."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from cores.config import ConfigError, EngineConfig
from cores.engine_core import EngineCore
from cores.messages import EngineCoreRequest, FinishReason, RankId, UtilityCall
from cores.pooling_params import PoolingParams
from cores.runner.interface import ModelInfo
from cores.runner.testing import add_random_weights, make_tiny_llama
from cores.runner.torch_runner import make_torch_runner
from cores.testing import make_request

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 130,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
PROMPTS = [[5 + (7 * i * i + 3 * k) % 290 for i in range(n)] for k, n in enumerate((1, 2, 3, 16, 17, 40, 64, 65, 128, 5))]


def make_model(path: Path, model_type: str, seed: int = 0, **settings: Any) -> Path:
    config = AutoConfig.for_model(model_type, **SMALL | (DISTIL if model_type == "distilbert" else {}) | settings)
    config.architectures = [type(AutoModel.from_config(config)).__name__]
    config.save_pretrained(path)
    return add_random_weights(path, seed, auto_class=AutoModel)


class Engine:
    def __init__(self, model: Path, **settings: Any) -> None:
        config = EngineConfig(**{"model": str(model), "device": "cpu", "dtype": "float32", "block_size": 8} | settings)
        runner = make_torch_runner(config, num_threads=1)
        self.info: ModelInfo = runner.load()
        self.core = EngineCore(RankId(0, 1), config, self.info, runner, clock=lambda: 0.0)
        self.errors: dict[int, str | None] = {}
        self.num_steps = 0

    def embed(self, prompts: Sequence[list[int]], **params: Any) -> dict[int, torch.Tensor]:
        """By number of the prompt. What has none is in `errors`."""
        for i, prompt in enumerate(prompts):
            self.core.add_request(0, embedding_request(i, prompt, **params))
        vectors: dict[int, torch.Tensor] = {}
        while self.core.has_work:
            self.num_steps += 1
            for outputs in self.core.step().values():
                assert not outputs.token_ids
                for row, handle in enumerate(outputs.handles):
                    if row in outputs.vectors:
                        assert outputs.finished[row].reason is FinishReason.STOP
                        assert row in outputs.first_tokens
                        vectors[handle] = torch.tensor(array("f", outputs.vectors[row]))
                    else:
                        self.errors[handle] = outputs.finished[row].error
            self.core.check_invariants()
        return vectors

    def call(self, method: str, *args: Any) -> None:
        result = self.core.call_utility(UtilityCall(1, 1, method, args))
        while result is None:
            self.core.step()
            result = next((late for _, late in self.core.take_late_results()), None)
        assert result.error is None, result.error


def embedding_request(handle: int, prompt: list[int], **params: Any) -> EngineCoreRequest:
    return dataclasses.replace(make_request(handle, prompt), pooling_params=PoolingParams(**params))


def references(model: Path, prompts: Sequence[list[int]], how: str = "mean") -> list[torch.Tensor]:
    """What transformers makes of each prompt alone."""
    reference = AutoModel.from_pretrained(model, attn_implementation="eager").eval()
    vectors = []
    for prompt in prompts:
        with torch.no_grad():
            hidden = reference(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        vector = {"mean": hidden.mean(dim=0), "cls": hidden[0], "last": hidden[-1]}[how]
        vectors.append(vector / vector.norm())
    return vectors


def assert_equal(vectors: dict[int, torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert vectors.keys() == set(range(len(expected)))
    for i, vector in enumerate(expected):
        torch.testing.assert_close(vectors[i], vector, rtol=0, atol=2e-6)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("bert"), "bert")


@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert", "mpnet", "electra", "modernbert"])
def test_an_encoders_vectors_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    model = make_model(tmp_path, model_type)
    assert_equal(Engine(model).embed(PROMPTS), references(model, PROMPTS))


@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 128}, {"max_num_seqs": 1}, {"block_size": 1}])
def test_how_many_prompts_share_a_step_changes_no_vector(bert: Path, settings: dict[str, int]) -> None:
    engine = Engine(bert, **settings)
    assert_equal(engine.embed(PROMPTS), references(bert, PROMPTS))
    assert engine.num_steps == {"max_num_batched_tokens": 5, "max_num_seqs": 10, "block_size": 1}[next(iter(settings))]
    assert engine.core.load().num_kv_blocks_used == 0


def test_the_recipe_of_sentence_transformers_is_followed(bert: Path, tmp_path: Path) -> None:
    for file in bert.iterdir():
        (tmp_path / file.name).symlink_to(file)
    modules = [
        {"type": f"sentence_transformers.models.{name}", "path": path} for name, path in (("Transformer", ""), ("Pooling", "p"))
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40}))
    engine = Engine(tmp_path)
    assert engine.info.max_model_len == 40
    vectors = engine.embed(PROMPTS[:6])
    assert vectors[0].norm() > 1.5  # no Normalize among the modules
    assert_equal({i: vector / vector.norm() for i, vector in vectors.items()}, references(bert, PROMPTS[:6], "cls"))
    assert_equal(engine.embed(PROMPTS[:6], normalize=True), references(bert, PROMPTS[:6], "cls"))


def test_a_vector_can_be_cut_where_the_model_was_trained_for_it(tmp_path: Path) -> None:
    model = make_model(tmp_path, "bert", matryoshka_dimensions=[8, 16, 32])
    engine = Engine(model)
    assert (engine.info.embedding_size, engine.info.embedding_dimensions) == (32, (8, 16, 32))
    whole = references(model, PROMPTS)
    assert_equal(engine.embed(PROMPTS, dimensions=8), [vector[:8] / vector[:8].norm() for vector in whole])


def test_what_an_encoder_cannot_take_fails_alone_and_says_why(bert: Path) -> None:
    engine = Engine(bert, max_model_len=64)
    engine.core.add_request(0, make_request(7, [5, 6]))
    vectors = engine.embed([PROMPTS[0], PROMPTS[-2], [], [5, 300], PROMPTS[7], PROMPTS[6]])
    assert vectors.keys() == {0, 5}
    assert engine.errors == {
        1: "a prompt of 128 tokens is too long: the model takes 64 in all",
        2: "the prompt is empty",
        3: "prompt token ids must be below the vocabulary's 300, got 300",
        4: "a prompt of 65 tokens is too long: the model takes 64 in all",
        7: "this model can embed, not generate",
    }


def test_a_prompt_whose_numbers_are_not_finite_fails_alone(tmp_path: Path) -> None:
    model = make_model(tmp_path, "bert")
    expected = references(model, PROMPTS)
    tensors = load_file(model / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][299] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    engine = Engine(model)
    vectors = engine.embed([*PROMPTS, [299, 5, 6]])
    assert engine.errors == {len(PROMPTS): "the model's output has numbers that are not finite"}
    assert_equal(vectors, expected)


@pytest.mark.parametrize("level", [1, 2])
def test_an_encoder_sleeps_and_takes_other_weights(bert: Path, tmp_path: Path, level: int) -> None:
    engine, other = Engine(bert), make_model(tmp_path, "bert", seed=1)
    engine.call("sleep", level)
    engine.call("wake_up")
    assert_equal(engine.embed(PROMPTS), references(bert, PROMPTS))
    engine.call("update_weights", str(other), 1)
    assert_equal(engine.embed(PROMPTS), references(other, PROMPTS))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 131}, "at most 130, the model's own, got 131"),
        ({"max_model_len": 100, "max_num_batched_tokens": 64}, "at most 64, --max-num-batched-tokens, .* got 100"),
        ({"runner": "generate"}, "not a causal language model"),
        ({"enable_lora": True}, "--enable-lora"),
    ],
)
def test_settings_that_an_encoder_cannot_keep_are_refused(bert: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine(bert, **settings)


def test_prompts_are_never_longer_than_a_step(bert: Path) -> None:
    assert Engine(bert, max_num_batched_tokens=64).info.max_model_len == 64


# --- the last token of a model that reads forward ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("budget", [2048, 24])
def test_a_decoders_vectors_are_its_last_hidden_states(llama: Path, budget: int) -> None:
    engine = Engine(llama, runner="pooling", num_kv_blocks=128, max_num_batched_tokens=budget)
    expected = references(llama, PROMPTS, "last")
    assert_equal(engine.embed(PROMPTS), expected)
    assert_equal(engine.embed(PROMPTS), expected)
    assert engine.core.stats().prefix_cache_hits > 250  # of 341 tokens, the second time
    assert (engine.info.supported_tasks, engine.info.embedding_size) == (("embed",), 64)


def test_a_prompt_may_be_as_long_as_the_model_takes(llama: Path) -> None:
    engine = Engine(llama, runner="pooling", num_kv_blocks=8, max_model_len=64)
    assert_equal(engine.embed([PROMPTS[6]]), references(llama, [PROMPTS[6]], "last"))
    engine.embed([PROMPTS[7]])
    assert engine.errors == {0: "a prompt of 65 tokens is too long: the model takes 64 in all"}


def test_a_text_model_embeds_only_if_told_to(llama: Path) -> None:
    engine = Engine(llama, num_kv_blocks=16)
    assert engine.embed([PROMPTS[0]]) == {}
    assert engine.errors == {0: "this model can generate, not embed"}
