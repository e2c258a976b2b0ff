"""`AsyncLLM` in a user's script, with the launcher as a child of that script."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cores.config import EngineConfig, SimulatedConfig
from gateway import AsyncLLM, GatewayConfig, SamplingParams
from gateway.config import ParallelConfig
from gateway.errors import EngineDeadError
from tests.e2e.marked_run import END_TIMEOUT_S, ROOT, poll_until

SCRIPT = """
import asyncio, sys
from cores.config import EngineConfig
from gateway import AsyncLLM, GatewayConfig
from gateway.config import ParallelConfig

async def main():
    engine = EngineConfig(model=sys.argv[1], engine="simulated")
    config = GatewayConfig(engine=engine, parallel=ParallelConfig(data_parallel_size=2, data_parallel_backend="mp"))
    await AsyncLLM.from_config(config)
    print("serving", "ray" in sys.modules, "torch" in sys.modules, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def short_tmp_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as directory:
        yield Path(directory)


def make_config(model: str, fault: str = "") -> GatewayConfig:
    engine = EngineConfig(model=model, engine="simulated", simulated=SimulatedConfig(fault=fault))
    return GatewayConfig(engine=engine, parallel=ParallelConfig(data_parallel_size=2, data_parallel_backend="mp"))


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


async def test_script_generates_over_two_ranks_and_shutdown_leaves_no_process(tiny_model: str) -> None:
    before = set(children())
    llm = await AsyncLLM.from_config(make_config(tiny_model))
    assert len(set(children()) - before) == 3  # the launcher and two ranks
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    async for output in llm.generate("one two", params, "request-1"):
        last = output
    assert last.finished
    assert last.stats.num_generation_tokens == 4
    await llm.shutdown()
    assert set(children()) <= before


async def test_rank_that_dies_while_loading_is_an_ordinary_exception_with_its_cause(tiny_model: str) -> None:
    before = set(children())
    with pytest.raises(EngineDeadError, match="rank 1 did not start: SimulatedFaultError: simulated fault at step 0"):
        await AsyncLLM.from_config(make_config(tiny_model, fault="raise_at_step=0@rank=1"))
    assert set(children()) <= before


async def test_launcher_that_cannot_be_told_what_to_do_is_an_exception_with_its_last_words(tiny_model: str) -> None:
    config = make_config(tiny_model)
    impossible = dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, data_parallel_backend="ray", ray_address="127.0.0.1:1")
    )
    with pytest.raises(EngineDeadError, match=r"cannot reach Ray at 127\.0\.0\.1:1: Connection refused"):
        await asyncio.wait_for(AsyncLLM.from_config(impossible), END_TIMEOUT_S)


def test_kill_9_of_the_script_leaves_no_process_and_it_never_loads_ray_or_torch(tiny_model: str, short_tmp_path: Path) -> None:
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, tiny_model],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        text=True,
        env=os.environ | {"TMPDIR": str(short_tmp_path)},
    )
    assert script.stdout is not None
    with script.stdout:
        assert script.stdout.readline() == "serving False False\n"
        below = psutil.Process(script.pid).children(recursive=True)
        assert len(below) == 3
        script.kill()
        script.wait(END_TIMEOUT_S)
    poll_until(lambda: not any(process.is_running() for process in below), "no process is left")
    assert list(short_tmp_path.iterdir()) == []
