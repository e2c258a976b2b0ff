from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from cores.launch.local_processes import LocalProcessLauncher
from gateway.config import ConfigError, GatewayConfig, ParallelConfig, ServerConfig
from gateway.launch.multi_port import FIRST_BACKOFF_S, MAX_RESTARTS, Endpoint, endpoint_configs
from gateway.launch.ranks import make_rank_launcher, ranks_on_node


def make_config(size: int, **server: object) -> GatewayConfig:
    parallel = ParallelConfig(data_parallel_size=size, data_parallel_multi_port_external_lb=True, data_parallel_backend="mp")
    return GatewayConfig(server=ServerConfig(**server), parallel=parallel)  # type: ignore[arg-type]


def test_each_rank_has_an_endpoint_on_the_next_port() -> None:
    endpoints = endpoint_configs(make_config(3, port=9000))
    assert [(e.server.port, e.parallel.ranks, e.parallel.is_external) for e in endpoints] == [
        (9000, (0,), True),
        (9001, (1,), True),
        (9002, (2,), True),
    ]
    assert not any(e.parallel.data_parallel_multi_port_external_lb for e in endpoints)


def test_port_0_stays_0_for_all() -> None:
    assert [e.server.port for e in endpoint_configs(make_config(2, port=0))] == [0, 0]


@pytest.mark.parametrize(
    ("server", "message"),
    [({"uds": "/tmp/s"}, "--uds is one socket"), ({"port": 65534}, "--port must be at most 65533 for 3 endpoints, got 65534")],
)
def test_what_several_endpoints_cannot_share_is_refused(server: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        endpoint_configs(make_config(3, **server))


@pytest.mark.parametrize(("address", "num_ranks"), [("127.0.0.1", 4), ("localhost", 4), ("::1", 4), ("10.0.0.7", 1)])
def test_endpoints_share_this_machine_if_their_coordinator_has_a_loopback_address(address: str, num_ranks: int) -> None:
    config = ParallelConfig(
        data_parallel_size=4, data_parallel_external_lb=True, data_parallel_rank=2, data_parallel_address=address
    )
    assert len(ranks_on_node(config)) == num_ranks


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.7"])
def test_a_node_of_several_serves_its_own_ranks_on_its_first_ports(address: str) -> None:
    parallel = ParallelConfig(
        data_parallel_size=8, data_parallel_multi_port_external_lb=True, data_parallel_start_rank=4, data_parallel_size_local=2,
        data_parallel_address=address,
    )  # fmt: skip
    endpoints = endpoint_configs(GatewayConfig(server=ServerConfig(port=9000), parallel=parallel))
    assert [(e.server.port, e.parallel.ranks) for e in endpoints] == [(9000, (4,)), (9001, (5,))]
    # Which cores and GPUs are whose: all ranks of the group are on this machine, or those two.
    expected = list(range(8)) if address == "127.0.0.1" else [4, 5]
    assert [list(ranks_on_node(e.parallel)) for e in endpoints] == [expected] * 2


def test_backend_chooses_the_rank_launcher(tmp_path: Path) -> None:
    config = make_config(1)
    mp = dataclasses.replace(config, parallel=ParallelConfig(data_parallel_backend="mp"))
    assert isinstance(make_rank_launcher(mp, tmp_path), LocalProcessLauncher)


class RecordingEndpoint(Endpoint):
    """Starts nothing: its lives are their exit codes."""

    def start(self, delay_s: float = 0.0) -> None:
        self.delays_s = [*getattr(self, "delays_s", []), delay_s]

    async def ends_with(self, code: int) -> bool:
        """Whether it may begin again."""

        async def end() -> int:
            return code

        self.ended = asyncio.create_task(end())
        await self.ended
        return self.restart(now=0.0)


async def test_a_rolling_restart_costs_nothing_of_what_an_endpoint_may_die() -> None:
    config = endpoint_configs(make_config(2))[0]
    endpoint = RecordingEndpoint(config, 2)
    assert [await endpoint.ends_with(0) for _ in range(20)] == [True] * 20
    assert endpoint.delays_s == [FIRST_BACKOFF_S] * 20
    deaths = [await endpoint.ends_with(1) for _ in range(MAX_RESTARTS + 1)]
    assert deaths == [True] * MAX_RESTARTS + [False]
