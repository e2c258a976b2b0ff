from __future__ import annotations

from collections.abc import AsyncIterator

import psutil
import pytest

from cores.launch.interface import RankLauncher
from cores.launch.local_processes import LocalProcessLauncher
from cores.launch.rank_environment import Machine
from cores.messages import EngineReady
from tests.integration.rank_launcher_contract import RankLauncherContract, Workplace


class TestLocalProcessLauncher(RankLauncherContract):
    @pytest.fixture
    async def launcher(self) -> AsyncIterator[RankLauncher]:
        launcher = LocalProcessLauncher(2, machine=Machine(num_cores=4, num_gpus=0))
        await launcher.open()
        yield launcher
        await launcher.close()

    async def test_rank_gets_its_share_of_the_cores(self, launcher: RankLauncher, place: Workplace) -> None:
        handle = await launcher.start(place.launch())
        await place.until(EngineReady)
        environment = psutil.Process(handle.pid).environ()
        assert environment["OMP_NUM_THREADS"] == "2"
        assert environment["OMP_WAIT_POLICY"] == "passive"
