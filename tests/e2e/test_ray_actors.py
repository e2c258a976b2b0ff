"""The rank launcher over Ray. One embedded cluster for the whole module, as several endpoints of one machine would share it."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cores.config import Transport
from cores.control_messages import RankLog
from cores.curve import GroupKey
from cores.launch.interface import LaunchError, RankLauncher
from cores.launch.rank_environment import Machine
from cores.launch.ray_cluster import EmbeddedRayCluster, use_own_token
from cores.messages import EngineCoreDead, EngineReady
from tests.integration.rank_launcher_contract import DEADLINE_S, RankLauncherContract, Workplace, poll_until


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
        launcher = make_launcher(directory, cluster_address)
        await launcher.open()
        yield launcher
        await launcher.close()

    async def test_rank_gets_its_share_of_the_cores_and_nothing_of_the_launchers_environment(
        self, launcher: RankLauncher, place: Workplace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OF_THE_LAUNCHER_ALONE", "1")
        handle = await launcher.start(place.launch())
        await place.until(EngineReady)
        process = psutil.Process(handle.pid)
        assert process.nice() == psutil.Process().nice()  # Ray by itself makes its workers nice
        environment = process.environ()
        assert environment["OMP_NUM_THREADS"] == "2"
        assert environment["OMP_WAIT_POLICY"] == "passive"
        assert "OF_THE_LAUNCHER_ALONE" not in environment


@pytest.fixture
def run_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gw-test-", dir="/tmp") as directory:
        yield Path(directory)


def make_launcher(directory: Path, address: str, num_local_ranks: int = 2, **settings: Any) -> Any:
    from cores.launch.ray_actors import RayActorLauncher  # not before the token is set: it imports ray

    return RayActorLauncher(num_local_ranks, directory, address=address, machine=Machine(num_cores=4, num_gpus=0), **settings)


async def test_ranks_that_need_gpus_which_the_node_has_not_are_refused_at_once(
    run_directory: Path, cluster_address: str
) -> None:
    launcher, place = make_launcher(run_directory, cluster_address, num_local_ranks=1000), Workplace(run_directory)
    await launcher.open()
    launch = place.launch()
    on_cuda = dataclasses.replace(launch, config=dataclasses.replace(launch.config, engine="torch", device="cuda"))
    with pytest.raises(LaunchError, match=r"1000 ranks on this node need a GPU each, Ray has \d+; or use --device cpu"):
        await launcher.start(on_cuda)
    await launcher.close()
    place.close()


async def test_rank_that_is_not_placed_in_time_is_an_error_that_says_what_was_asked_and_what_there_is(
    run_directory: Path, cluster_address: str
) -> None:
    launcher, place = make_launcher(run_directory, cluster_address, place_timeout_s=0.001), Workplace(run_directory)
    await launcher.open()
    told = (
        r"not placed rank 0 on node \S+ within 0\.001 s\nasked: a node with CPUs; there:\n"
        r"  node .*CPUs  GPUs free  ranks here\n  \S+ "
    )
    with pytest.raises(LaunchError, match=told):
        await launcher.start(place.launch())
    await launcher.close()
    place.close()


async def test_a_node_that_is_no_part_of_the_cluster_any_more_is_no_place_and_no_index_error(
    run_directory: Path, cluster_address: str
) -> None:
    launcher, place = make_launcher(run_directory, cluster_address, place_timeout_s=0.01), Workplace(run_directory)
    await launcher.open()
    launcher._node_id = "of a raylet that has ended"
    with pytest.raises(LaunchError, match=r"^no node has had room for rank 0 for 0\.01 s\nasked: a node with CPUs; there:"):
        await launcher.start(place.launch())
    await launcher.close()
    place.close()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "cannot reach Ray at 127.0.0.1:1: Connection refused"),
        ("ray://127.0.0.1:10001", "is a client's; give the cluster's own, HOST:PORT"),
    ],
)
async def test_cluster_that_cannot_be_joined_is_refused_at_once(run_directory: Path, address: str, message: str) -> None:
    launcher = make_launcher(run_directory, address)
    with pytest.raises(LaunchError, match=message):
        await launcher.open()
    await launcher.close()


async def test_rank_over_tcp_sends_its_log_and_shows_its_key_to_nobody(
    run_directory: Path, cluster_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = GroupKey.make().secret.decode()
    launcher = make_launcher(run_directory, cluster_address, spreads=True)
    await launcher.open()
    place = Workplace(run_directory, Transport(host=launcher.host, curve_secret=secret))
    launch = dataclasses.replace(place.launch(3, fault="raise_at_step=0"), log_level="debug")
    handle = await launcher.start(launch)
    process = psutil.Process(handle.pid)
    seen = [*process.cmdline(), *process.environ().values()]
    assert "simulated fault at step 0" in (await place.until(EngineCoreDead, 3)).cause
    assert "code 1" in (await asyncio.wait_for(handle.wait(), DEADLINE_S)).cause
    await poll_until(lambda: "simulated fault" in "".join(lines_of(place, 3)), "its log")
    log = capsys.readouterr().err
    assert "[rank 3]" in log
    assert secret not in log
    assert not any(secret in text for text in seen)
    await launcher.close()
    place.close()


def lines_of(place: Workplace, rank: int) -> list[str]:
    logs = [message for message in place.received if isinstance(message, RankLog) and message.rank_id.rank == rank]
    return [line for log in logs for line in log.lines]
