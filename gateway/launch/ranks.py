"""Which rank launcher a configuration asks for. The only place of the front-end package that knows both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cores.config import is_loopback
from cores.launch.interface import RankLauncher
from cores.launch.local_processes import LocalProcessLauncher
from cores.launch.ray_cluster import outlive_head, use_own_token
from gateway.config import GatewayConfig, ParallelConfig


def ranks_on_node(config: ParallelConfig) -> Sequence[int]:
    """The ranks that share this machine's cores and GPUs. Endpoints whose coordinator has a loopback address are all here."""
    if is_loopback(config.data_parallel_address):
        return range(config.data_parallel_size)
    alone = config.is_external and config.data_parallel_size_local is None
    return config.ranks if alone else config.ranks_of_node


def runs_over_tcp(config: ParallelConfig) -> bool:
    """By default where ranks may be on other nodes: one endpoint has the whole group, in a Ray cluster that it has joined."""
    if config.data_parallel_transport != "auto":
        return config.data_parallel_transport == "tcp"
    return config.data_parallel_backend == "ray" and config.ray_address is not None and not config.has_others


def address_to_bind(config: ParallelConfig) -> str | None:
    """Where launcher and front ends listen, if the user says so. Of a part of a group the address is the coordinator's."""
    is_its_own = not config.has_others and not is_loopback(config.data_parallel_address)
    return config.data_parallel_address if is_its_own else None


def make_rank_launcher(config: GatewayConfig, run_directory: Path) -> RankLauncher:
    spreads = runs_over_tcp(config.parallel)
    num_ranks = len(config.parallel.ranks if spreads else ranks_on_node(config.parallel))
    ready_timeout_s = config.fault.engine_ready_timeout
    if config.parallel.data_parallel_backend == "mp":
        return LocalProcessLauncher(len(ranks_on_node(config.parallel)))
    outlive_head()  # and this, before the import below: Ray reads it once
    if config.parallel.ray_address is None:
        use_own_token()
    from cores.launch.ray_actors import PLACE_TIMEOUT_S, RayActorLauncher  # 66 MiB and half a second that `mp` need not pay

    return RayActorLauncher(
        num_ranks,
        run_directory,
        address=config.parallel.ray_address,
        spreads=spreads,
        place_timeout_s=min(PLACE_TIMEOUT_S, ready_timeout_s),
        return_timeout_s=ready_timeout_s,
    )
