"""What a decode step costs beside the model's forward, with 64 sequences: a rank's speed is bounded by it whatever the GPU.

Over the simulated runner, which computes nothing and here takes no time, a whole step is overhead: schedule, choose tokens,
book them, make the output message and encode it. The torch runner's own share, inputs before the forward and sampling after it,
is measured by itself, on logits of the demo model's vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from cores.codec import encode
from cores.config import EngineConfig
from cores.engine_core import EngineCore
from cores.messages import RankId
from cores.request import Request
from cores.runner.input_batch import build_input_batch
from cores.runner.interface import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from cores.runner.padded_attention import make_padded_attention
from cores.runner.paged_kv_cache import KVCacheShape, PagedKVCache
from cores.runner.sampler import Sampler
from cores.runner.simulated import SimulatedModelRunner
from cores.testing import make_request, make_tiny_model_dir
from scripts.benchmarks.report import Row, compare

NUM_SEQS = 64
NUM_PROMPT_TOKENS = 94
LIMIT_MS = 1.0
NUM_STEPS = 200  # per run
VOCAB_SIZE = 49_152
BLOCK_SIZE = 16
CPU = torch.device("cpu")


def overhead(num_runs: int) -> list[Row]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _rows(num_runs)
    finally:
        torch.set_num_threads(num_threads)


def _rows(num_runs: int) -> list[Row]:
    whole, in_runner = zip(*(_simulated_step_ms() for _ in range(num_runs)), strict=True)
    rows = [
        compare(f"step of {NUM_SEQS} decodes, simulated runner", "ms", whole, "limit", [LIMIT_MS]),
        compare("of it: tokens of the simulated runner", "ms", in_runner, "", []),
    ]
    for name, measure in (
        ("torch runner: inputs", _inputs_ms),
        ("torch runner: greedy tokens", lambda: _sampling_ms(temperature=0.0)),
        ("torch runner: sampled tokens", lambda: _sampling_ms(temperature=1.0)),
        ("torch runner: sampled tokens, top-p", lambda: _sampling_ms(temperature=1.0, top_p=0.9)),
    ):
        rows.append(compare(name, "ms", [measure() for _ in range(num_runs)], "", []))
    return rows


class TimedRunner(SimulatedModelRunner):
    """Knows how long it took."""

    last_s = 0.0

    def execute(self, batch: SchedulerOutput) -> ModelRunnerOutput:
        start_s = time.perf_counter()
        output = super().execute(batch)
        self.last_s = time.perf_counter() - start_s
        return output


def _simulated_step_ms() -> tuple[float, float]:
    """Medians over a run: a whole step, and the runner's part of it."""
    with TemporaryDirectory() as directory:
        model = make_tiny_model_dir(Path(directory) / "model")
        config = EngineConfig(model=str(model), engine="simulated", num_kv_blocks=4096, block_size=BLOCK_SIZE)
        runner = TimedRunner(config, RankId(0, 1), sleep=lambda _: None)
        core = EngineCore(RankId(0, 1), config, runner.load(), runner, time.perf_counter)
    for handle in range(NUM_SEQS):
        core.add_request(0, make_request(handle, NUM_PROMPT_TOKENS + handle, temperature=1.0, max_tokens=NUM_STEPS + 20))
    while core.load().num_decodes < NUM_SEQS:
        core.step()
    steps = []
    for _ in range(NUM_STEPS):
        start_s = time.perf_counter()
        for outputs in core.step().values():
            encode(outputs)
        steps.append((1e3 * (time.perf_counter() - start_s), 1e3 * runner.last_s))
    return median(step for step, _ in steps), median(part for _, part in steps)


def _requests(**params: float) -> list[Request]:
    """In the middle of their output."""
    requests = []
    for handle in range(NUM_SEQS):
        request = Request.from_engine_core_request(0, make_request(handle, NUM_PROMPT_TOKENS + handle, **params), 2048)
        request.num_computed_tokens = request.num_tokens - 1
        num_blocks = request.num_tokens // BLOCK_SIZE + 1
        request.block_ids = list(range(handle * 16, handle * 16 + num_blocks))
        requests.append(request)
    return requests


def _inputs_ms() -> float:
    shape = KVCacheShape(num_layers=1, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=8, dtype=torch.float32)
    cache = PagedKVCache(shape, NUM_SEQS * 16, CPU)
    batch = SchedulerOutput([ScheduledRequest(request, 1, True) for request in _requests()], NUM_SEQS, NUM_SEQS)
    make_attention = partial(make_padded_attention, dtype=torch.float32)
    return _median_ms(lambda: build_input_batch(batch, cache, make_attention, CPU))


def _sampling_ms(**params: float) -> float:
    sampler, requests = Sampler(VOCAB_SIZE, CPU), _requests(**params)
    # As peaked as a model's: a nucleus of 0.9 has tens of tokens, not tens of thousands.
    logits = 5 * torch.randn(NUM_SEQS, VOCAB_SIZE)
    return _median_ms(lambda: sampler.sample(logits, requests), num_times=3)


@torch.inference_mode()
def _median_ms(do: Callable[[], object], num_times: int = NUM_STEPS) -> float:
    times_ms = []
    for _ in range(num_times):
        start_s = time.perf_counter()
        do()
        times_ms.append(1e3 * (time.perf_counter() - start_s))
    return median(times_ms)
