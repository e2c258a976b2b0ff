"""Which rank launcher a configuration asks for. The only place of the front-end package that knows both."""

from __future__ import annotations

from pathlib import Path

from cores.config import is_loopback
from cores.launch.interface import RankLauncher
from cores.launch.local_processes import LocalProcessLauncher
from cores.launch.ray_cluster import use_own_token
from gateway.config import GatewayConfig, ParallelConfig


def num_ranks_on_node(config: ParallelConfig) -> int:
    """How many ranks share this machine's cores and GPUs. Endpoints whose coordinator has a loopback address are all here."""
    return config.data_parallel_size if is_loopback(config.data_parallel_address) else len(config.ranks)


def make_rank_launcher(config: GatewayConfig, run_directory: Path) -> RankLauncher:
    num_local_ranks = num_ranks_on_node(config.parallel)
    if config.parallel.data_parallel_backend == "mp":
        return LocalProcessLauncher(num_local_ranks)
    if config.parallel.ray_address is None:
        use_own_token()  # before the import below: Ray reads it once
    from cores.launch.ray_actors import RayActorLauncher  # 66 MiB and half a second that `mp` need not pay

    return RayActorLauncher(num_local_ranks, run_directory, address=config.parallel.ray_address)
