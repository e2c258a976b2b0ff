"""Checks the torch engine on a GPU: that its greedy tokens are those of transformers, and how near decoding is to its bound.

Two engines: float32, where every token must be equal, over padded batches; and bfloat16, the way that people serve, over
torch's FlashAttention and block tables. There the order of sums differs, so two tokens whose logits are nearly equal may change
places: where the texts part, transformers' own logits must say that it was such a case.

`--device cpu` runs the same without a GPU, to see that the script works.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cores.config import EngineConfig
from cores.engine_core import EngineCore
from cores.loader import weight_bytes
from cores.messages import RankId
from cores.runner.model_runner import TorchModelRunner
from cores.testing import make_request
from scripts.benchmarks.servers import model_directory

NUM_TOKENS = 48
PROMPT_LENGTHS = (1, 7, 16, 33, 100, 255, 256, 257, 600, 1100)
# In units of logits: what bfloat16 may move one by, a few steps of 1/128 at a size of 8 to 16.
MAX_NEAR_TIE = 0.25
BATCH_SIZES = (1, 8, 32, 128)
NUM_PROMPT_TOKENS, NUM_TIMED_STEPS = 256, 64


class Engine:
    """One engine core without a process around it."""

    def __init__(self, model: str, device: Any, dtype: Any) -> None:
        config = EngineConfig(model=model, device=device, dtype=dtype, max_model_len=2048, enable_prefix_caching=False)
        self.runner = TorchModelRunner(config)
        self.core = EngineCore(RankId(0, 1), config, self.runner.load(), self.runner, time.monotonic)

    @property
    def attention(self) -> str:
        make_attention: Any = self.runner._loaded_parts.make_attention
        return str(make_attention.func.__name__.removeprefix("make_"))

    def greedy(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        for handle, prompt in enumerate(prompts):
            self.core.add_request(0, make_request(handle, prompt, max_tokens=max_tokens, ignore_eos=True))
        tokens: list[list[int]] = [[] for _ in prompts]
        while self.core.has_work:
            for outputs in self.core.step().values():
                for handle, token_id in zip(outputs.handles, outputs.token_ids, strict=True):
                    tokens[handle].append(token_id)
        return tokens


def make_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    return [[(i * i * 31 + 7919 * n + 13 * i) % (vocab_size - 100) + 50 for i in range(n)] for n in lengths]


# --- equality ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    num_equal: int
    num_near_ties: int
    faults: list[str]


def check_equality(model: str, device: str, dtype: str, max_near_tie: float) -> Comparison:
    engine = Engine(model, device, dtype)
    prompts = make_prompts(PROMPT_LENGTHS, engine.core.info.vocab_size)
    ours = engine.greedy(prompts, NUM_TOKENS)
    print(f"{dtype}, {engine.attention}, blocks of {engine.core.info.block_size}:", end=" ", flush=True)
    del engine
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()
    num_equal, num_near_ties, faults = 0, 0, []
    for prompt, tokens in zip(prompts, ours, strict=True):
        gap = _gap_where_they_part(reference, prompt, tokens)
        if gap is None:
            num_equal += 1
        elif gap <= max_near_tie:
            num_near_ties += 1
        else:
            faults.append(f"after a prompt of {len(prompt)} tokens one is chosen whose logit is {gap:.3f} below the best")
    return Comparison(num_equal, num_near_ties, faults)


@torch.inference_mode()
def _gap_where_they_part(reference: Any, prompt: list[int], tokens: list[int]) -> float | None:
    """How much less than its best token the reference thinks of the first of `tokens` that it would not have chosen."""
    ids = torch.tensor([prompt + tokens], device=reference.device)
    logits = (
        reference(ids).logits[0, len(prompt) - 1 : -1].float()
    )  # [tokens, vocabulary]: each position after the tokens before
    gaps = logits.max(dim=-1).values - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    parting = gaps.nonzero()
    return float(gaps[parting[0]]) if len(parting) else None


# --- speed ------------------------------------------------------------------------------------------------------------------


def bound_tokens_per_s(
    bytes_per_s: float, num_weight_bytes: int, kv_bytes_per_token: int, batch_size: int, num_context_tokens: float
) -> float:
    """Of decoding, if a step did nothing but read all weights once and the K and V of every context."""
    return batch_size * bytes_per_s / (num_weight_bytes + batch_size * num_context_tokens * kv_bytes_per_token)


def measured_bytes_per_s(device: torch.device, num_bytes: int = 1 << 30) -> float:
    """Of a copy, which reads and writes: the best of a few."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(5):
        start_s = _now(device)
        target.copy_(source)
        best_s = min(best_s, _now(device) - start_s)
    return 2 * num_bytes / best_s


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def decode_tokens_per_s(engine: Engine, batch_size: int) -> float:
    prompts = make_prompts([NUM_PROMPT_TOKENS] * batch_size, engine.core.info.vocab_size)
    for handle, prompt in enumerate(prompts):
        engine.core.add_request(0, make_request(handle, prompt, max_tokens=NUM_TIMED_STEPS + 8, ignore_eos=True))
    core = engine.core
    while core.load().num_prefill_tokens or core.load().num_waiting:
        core.step()
    start_s, num_steps = time.perf_counter(), 0
    while num_steps < NUM_TIMED_STEPS:  # each brings its tokens to the host: no synchronisation is missing
        core.step()
        num_steps += 1
    duration_s = time.perf_counter() - start_s
    core.abort_requests(0, range(batch_size))
    return batch_size * num_steps / duration_s


def print_speed(model: str, device: torch.device) -> None:
    engine = Engine(model, device.type, "bfloat16")
    loaded = engine.runner._loaded_parts.loaded
    num_weight_bytes = weight_bytes(Path(model), loaded.model.config, loaded.dtype)
    kv_bytes = loaded.cache_shape.block_bytes // loaded.cache_shape.block_size
    bytes_per_s = measured_bytes_per_s(device)
    print(f"weights {num_weight_bytes >> 20} MiB, K and V {kv_bytes} bytes a token, memory {bytes_per_s / 1e9:.0f} GB/s (copy)")
    print(f"{'sequences':>10}{'tok/s':>10}{'bound':>12}{'share':>8}")
    for batch_size in BATCH_SIZES:
        speed = decode_tokens_per_s(engine, batch_size)
        context = NUM_PROMPT_TOKENS + NUM_TIMED_STEPS / 2
        bound = bound_tokens_per_s(bytes_per_s, num_weight_bytes, kv_bytes, batch_size, context)
        print(f"{batch_size:>10}{speed:>10.0f}{bound:>12.0f}{speed / bound:>8.1%}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="Hugging Face style directory (default: the demo model)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked", file=sys.stderr)
        return 2
    model, device = args.model or model_directory(), torch.device(args.device, 0 if args.device == "cuda" else None)
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name(device) if args.device == 'cuda' else 'cpu'}")
    faults = []
    for dtype, max_near_tie in (("float32", 0.0), ("bfloat16", MAX_NEAR_TIE)):
        comparison = check_equality(model, args.device, dtype, max_near_tie)
        ties = f", {comparison.num_near_ties} part at a near tie" if comparison.num_near_ties else ""
        print(f"{comparison.num_equal} of {len(PROMPT_LENGTHS)} equal transformers{ties}", *comparison.faults, sep="\n  ")
        faults += comparison.faults
    print_speed(model, device)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
