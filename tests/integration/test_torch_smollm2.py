"""The demo model itself: what was converted answers, and our engine computes what transformers computes with it.

Pulls the model when it is not on this machine yet.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from cores.testing import make_request
from gateway.models import pull_model
from tests.cores.runner.torch_engine import Engine

NUM_TOKENS = 12
QUESTIONS = ["What is the capital of France?", "1 + 1 = ?", "Say hello in Spanish. " * 8]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return pull_model("smollm2")


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for q in QUESTIONS
    ]


def test_greedy_answers_equal_those_of_transformers_and_say_paris(smollm2: Path, prompts: list[list[int]]) -> None:
    engine = Engine(smollm2, num_kv_blocks=64, max_num_batched_tokens=48, max_model_len=512)
    requests = [make_request(i, prompt, max_tokens=NUM_TOKENS, ignore_eos=False) for i, prompt in enumerate(prompts)]
    answers = engine.run(requests)
    engine.core.shutdown()
    assert "Paris" in Tokenizer.from_file(str(smollm2 / "tokenizer.json")).decode(answers[0])

    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        assert answers[i] == out[0, len(prompt) :].tolist()
    assert answers[0][-1] == 2, "the answer about France is short: it ends with <|im_end|>"


def test_the_tokenizer_splits_digits_as_the_model_has_learned_it(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.encode("a  123").tokens == ["a", "ĠĠ", "1", "2", "3"]
    assert tokenizer.encode("x<|im_end|>").ids[-1] == 2
    text = "déjà vu, 日本 🙂  42\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
