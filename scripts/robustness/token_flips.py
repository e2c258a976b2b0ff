"""How often does a continued request get another token than it would have got undisturbed, because of rounding?

After a rank's death the next one computes prompt and tokens so far in one go, where the first had computed them token by token,
in other company. Sums are then rounded in another order, and where two tokens are almost equally likely the other may win.
Greedy requests over the demo model run undisturbed, so many at a time; then each is cut at random and continued from its prompt
and its tokens so far, in another batch, nothing cached. Compared is what comes after the cut.

    python -m scripts.robustness.token_flips                   # bfloat16, float32, and what no batch can change
    python -m scripts.robustness.token_flips --speeds          # what the latter costs: 1, 8 and 32 sequences at a time

Arithmetic that does not depend on the batch can be had without kernels made for it, in two ways. Linear layers compute so many
rows at a time, whatever the step has, the last rows padded (`fixed_shapes`); attention still depends on how a prompt comes. Or
one token is computed at a time, prompts too: then nothing depends on anything.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cores.config import EngineConfig
from cores.engine_core import EngineCore
from cores.messages import EngineCoreRequest, RankId
from cores.runner.model_runner import TorchModelRunner
from cores.testing import make_request
from gateway.tokenizer import Tokenizer
from scripts.benchmarks.prompts import SAMPLE_WORDS
from scripts.benchmarks.servers import model_directory
from scripts.robustness.fixed_shapes import products_of

NUM_TOKENS = 64
BATCH, OTHER_BATCH = 8, 3  # sequences at a time: undisturbed, and where they go on
PROMPT_WORDS = (10, 60)
NUM_THREADS = 2
TILES = (8, 32)  # rows
ONE_AT_A_TIME: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 1}


@dataclass
class Outcome:
    name: str
    num_cut: int = 0
    num_other: int = 0  # that went on differently
    num_compared: int = 0  # tokens behind the cuts, up to and with the first that differs
    tokens_per_s: list[float] = field(default_factory=list)  # undisturbed

    def line(self) -> str:
        rate = self.num_other / self.num_compared if self.num_compared else 0.0
        share = f"{self.num_other} of {self.num_cut} sequences went on differently"
        speed = sum(self.tokens_per_s) / len(self.tokens_per_s)
        return f"{self.name:<28} {share}: {100 * rate:.2f} % of the tokens; {speed:.1f} tokens/s undisturbed"


class Engine:
    """One engine core, stepped by hand."""

    def __init__(self, model: str, dtype: str, **settings: Any) -> None:
        config = EngineConfig(
            model=model, engine="torch", device="cpu", dtype=dtype, num_kv_blocks=512, max_model_len=1024, **settings
        )  # type: ignore[arg-type]  # the name of a dtype
        runner = TorchModelRunner(config, num_threads=NUM_THREADS)
        self._core = EngineCore(RankId(0, 1), config, runner.load(), runner, clock=time.monotonic)

    def run(self, requests: Sequence[EngineCoreRequest], batch: int) -> dict[int, list[int]]:
        """Tokens by handle. So many requests at a time, and none finds anything cached."""
        tokens: dict[int, list[int]] = {request.handle: [] for request in requests}
        for start in range(0, len(requests), batch):
            self._core.operations.reset_prefix_cache()
            for request in requests[start : start + batch]:
                self._core.add_request(0, request)
            while self._core.has_work:
                for outputs in self._core.step().values():
                    for handle, token_id in zip(outputs.handles, outputs.token_ids, strict=True):
                        tokens[handle].append(token_id)
        return tokens

    def tokens_per_s(self, prompts: Sequence[list[int]]) -> float:
        """Of all of them together, from the first token on."""
        for i, prompt in enumerate(prompts):
            self._core.add_request(0, make_request(i, prompt, max_tokens=NUM_TOKENS))
        num_tokens, start_s = 0, time.monotonic()
        while self._core.has_work:
            num_new = sum(len(outputs.token_ids) for outputs in self._core.step().values())
            if num_tokens < len(prompts):  # the prompts' own time is not counted
                start_s = time.monotonic()
                num_before = num_tokens + num_new
            num_tokens += num_new
        return (num_tokens - num_before) / (time.monotonic() - start_s)

    def close(self) -> None:
        self._core.shutdown()


def make_prompts(model: str, count: int, rng: random.Random) -> list[list[int]]:
    tokenizer, words = Tokenizer.from_directory(model), SAMPLE_WORDS.split()
    texts = [f"Tell me about {' '.join(rng.choices(words, k=rng.randint(*PROMPT_WORDS)))}" for _ in range(count)]
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(chat.format(text), add_special_tokens=False) for text in texts]


def compare(name: str, model: str, dtype: str, prompts: list[list[int]], rng: random.Random, **settings: Any) -> Outcome:
    outcome = Outcome(name)
    engine = Engine(model, dtype, **settings)
    start_s = time.monotonic()
    whole = engine.run([make_request(i, prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(prompts)], BATCH)
    outcome.tokens_per_s.append(len(prompts) * NUM_TOKENS / (time.monotonic() - start_s))
    cuts = [rng.randint(1, NUM_TOKENS - 1) for _ in prompts]
    continued = [
        make_request(i, prompt + whole[i][:cut], max_tokens=NUM_TOKENS, num_original_prompt_tokens=len(prompt))
        for i, (prompt, cut) in enumerate(zip(prompts, cuts, strict=True))
    ]
    rng.shuffle(continued)
    rest = engine.run(continued, OTHER_BATCH)
    engine.close()
    for i, cut in enumerate(cuts):
        expected = whole[i][cut:]
        assert len(rest[i]) == len(expected)
        first = next((k for k, (a, b) in enumerate(zip(expected, rest[i], strict=True)) if a != b), None)
        outcome.num_cut += 1
        outcome.num_other += first is not None
        outcome.num_compared += len(expected) if first is None else first + 1
    return outcome


def show_flips(model: str, prompts: list[list[int]], seed: int) -> None:
    few = prompts[: max(2, len(prompts) // 32)]
    for name, dtype, num_rows, some, settings in (
        ("bfloat16", "bfloat16", None, prompts, {}),
        ("float32", "float32", None, prompts, {}),
        *((f"bfloat16, {n} rows at a time", "bfloat16", n, prompts, {}) for n in TILES),
        ("bfloat16, a token at a time", "bfloat16", None, few, ONE_AT_A_TIME),
    ):
        with products_of(num_rows):
            outcome = compare(name, model, dtype, some, random.Random(seed), **settings)
        print(outcome.line(), flush=True)


def show_speeds(model: str, prompts: list[list[int]]) -> None:
    for name, num_rows in (("bfloat16", None), *((f"bfloat16, {n} rows at a time", n) for n in (1, *TILES))):
        with products_of(num_rows):
            engine = Engine(model, "bfloat16")
            engine.tokens_per_s(prompts[:1])  # warms up
            speeds = [engine.tokens_per_s(prompts[:count]) for count in (1, 8, 32)]
            engine.close()
        print(f"{name:<28} 1, 8, 32 sequences at a time: {', '.join(f'{speed:.1f}' for speed in speeds)} tokens/s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speeds", action="store_true", help="tokens a second in place of flips")
    args = parser.parse_args()
    model = model_directory()
    prompts = make_prompts(model, max(32, args.sequences), random.Random(args.seed))
    if args.speeds:
        show_speeds(model, prompts)
    else:
        show_flips(model, prompts[: args.sequences], args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
