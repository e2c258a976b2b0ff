"""Which rank launcher a configuration asks for. The only place of the front-end package that knows both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cores.config import is_loopback
from cores.launch.interface import RankLauncher
from cores.launch.local_processes import LocalProcessLauncher
from cores.launch.ray_cluster import use_own_token
from gateway.config import GatewayConfig, ParallelConfig


def ranks_on_node(config: ParallelConfig) -> Sequence[int]:
    """The ranks that share this machine's cores and GPUs. Endpoints whose coordinator has a loopback address are all here."""
    if is_loopback(config.data_parallel_address):
        return range(config.data_parallel_size)
    alone = config.is_external and config.data_parallel_size_local is None
    return config.ranks if alone else config.ranks_of_node


def make_rank_launcher(config: GatewayConfig, run_directory: Path) -> RankLauncher:
    num_local_ranks = len(ranks_on_node(config.parallel))
    if config.parallel.data_parallel_backend == "mp":
        return LocalProcessLauncher(num_local_ranks)
    if config.parallel.ray_address is None:
        use_own_token()  # before the import below: Ray reads it once
    from cores.launch.ray_actors import RayActorLauncher  # 66 MiB and half a second that `mp` need not pay

    return RayActorLauncher(num_local_ranks, run_directory, address=config.parallel.ray_address)
