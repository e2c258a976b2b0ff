"""Embedded engine clients: real launcher, real engine processes with the simulated engine, no HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cores.config import EngineConfig, SimulatedConfig
from cores.testing import make_tiny_model_dir
from gateway import AsyncLLM, GatewayConfig
from gateway.config import FaultConfig, ParallelConfig
from tests.integration.llm_harness import Start, check_empty


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny", max_model_len=8192)


@pytest.fixture
async def start(model: Path) -> AsyncIterator[Start]:
    """Starts engine clients and, after the test, checks that nothing is left in any of their maps."""
    async with contextlib.AsyncExitStack() as stack:

        async def start_llm(
            num_ranks: int = 2,
            *,
            step_ms: float = 1.0,
            fault: str = "",
            engine_settings: dict[str, Any] | None = None,
            fault_tolerance: FaultConfig | None = None,
            **parts: Any,
        ) -> AsyncLLM:
            simulated = SimulatedConfig(step_ms=step_ms, fault=fault)
            engine = {"model": str(model), "engine": "simulated", "simulated": simulated} | (engine_settings or {})
            config = GatewayConfig(
                engine=EngineConfig(**engine),
                parallel=ParallelConfig(data_parallel_size=num_ranks, data_parallel_backend="mp"),
                fault=fault_tolerance or FaultConfig(engine_restarts=0),
                **parts,
            )
            llm = await AsyncLLM.from_config(config)
            stack.push_async_callback(llm.shutdown)
            stack.push_async_callback(check_empty, llm)
            return llm

        yield start_llm
