"""Output tokens per second of `transformers` alone, without a server: `generate` on a padded batch, or continuous batching.

Run as a process of its own, `python -m scripts.benchmarks.transformers_speed`, it reads one JSON object and prints a number:
torch then has all cores, and what it leaves behind ends with it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from typing import Any

METHODS = ("generate", "continuous batching")


def tokens_per_s(method: str, model: str, num_sequences: int, num_prompt_tokens: int, max_tokens: int) -> float:
    """Raises `CalledProcessError`."""
    orders = {
        "method": method, "model": model, "num_sequences": num_sequences, "num_prompt_tokens": num_prompt_tokens,
        "max_tokens": max_tokens,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=json.dumps(orders), stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout.splitlines()[-1])


def measure(method: str, model: str, num_sequences: int, num_prompt_tokens: int, max_tokens: int) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 40000) for _ in range(num_prompt_tokens)] for _ in range(num_sequences)]
    run = _generate if method == "generate" else _continuous_batching
    run(loaded, prompts[:1], 4)  # warm-up
    start_s = time.perf_counter()
    num_tokens = run(loaded, prompts, max_tokens)
    return num_tokens / (time.perf_counter() - start_s)


def _generate(model: Any, prompts: list[list[int]], max_tokens: int) -> int:
    import torch

    ids = torch.tensor(prompts)
    settings = {"do_sample": False, "min_new_tokens": max_tokens, "max_new_tokens": max_tokens, "pad_token_id": 0}
    return int(model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[:, ids.shape[1] :].numel())


def _continuous_batching(model: Any, prompts: list[list[int]], max_tokens: int) -> int:
    from transformers import GenerationConfig

    settings = GenerationConfig(do_sample=False, max_new_tokens=max_tokens, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(prompts, generation_config=settings)
    return sum(len(output.generated_tokens) for output in outputs.values())


if __name__ == "__main__":
    print(measure(**json.load(sys.stdin)))
