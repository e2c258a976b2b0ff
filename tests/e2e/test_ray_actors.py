"""The rank launcher over Ray. One embedded cluster for the whole module, as several endpoints of one machine would share it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from cores.launch.interface import RankLauncher
from cores.launch.rank_environment import Machine
from cores.launch.ray_cluster import EmbeddedRayCluster, use_own_token
from cores.messages import EngineReady
from tests.integration.rank_launcher_contract import RankLauncherContract, Workplace


@pytest.fixture(scope="module")
def cluster_address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gw-ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        use_own_token()
        with asyncio.Runner() as runner:
            cluster = EmbeddedRayCluster(Path(directory))
            try:
                runner.run(cluster.start())
                yield cluster.address
            finally:
                runner.run(cluster.stop())


class TestRayActorLauncher(RankLauncherContract):
    @pytest.fixture
    async def launcher(self, directory: Path, cluster_address: str) -> AsyncIterator[RankLauncher]:
        from cores.launch.ray_actors import RayActorLauncher  # not before the token is set

        launcher = RayActorLauncher(2, directory, address=cluster_address, machine=Machine(num_cores=4, num_gpus=0))
        await launcher.open()
        yield launcher
        await launcher.close()

    async def test_rank_gets_its_share_of_the_cores(self, launcher: RankLauncher, place: Workplace) -> None:
        handle = await launcher.start(place.launch())
        await place.until(EngineReady)
        environment = psutil.Process(handle.pid).environ()
        assert environment["OMP_NUM_THREADS"] == "2"
        assert environment["OMP_WAIT_POLICY"] == "passive"
