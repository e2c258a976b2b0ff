"""What every `RankLauncher` must do, with a real engine core (the simulated one) behind it. Subclasses bring the launcher."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import zmq

from cores.codec import Message
from cores.config import UNIX_SOCKETS, EngineConfig, EngineLaunch, FrontEndAddress, SimulatedConfig, Transport
from cores.control_messages import RankLog, Shutdown
from cores.curve import GroupKey
from cores.launch.interface import RankLauncher
from cores.launch.rank_log import show
from cores.messages import EngineCoreDead, EngineReady, RankId
from cores.testing import make_tiny_model_dir
from gateway.launch.control import ControlSocket

M = TypeVar("M", bound=Message)

DEADLINE_S = 60.0


class Workplace:
    """A run directory with the launcher's control socket and a front end's two sockets, which nobody reads."""

    def __init__(self, directory: Path, transport: Transport = UNIX_SOCKETS) -> None:
        self.directory = directory
        self.received: list[Message] = []
        self._transport = transport
        self.control = ControlSocket(self._on_message)
        self.control.start(transport.address(str(directory), "control"), GroupKey.of(transport))
        self.front_end = FrontEndAddress(
            index=0, input_address=f"ipc://{directory}/in", output_address=f"ipc://{directory}/out"
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = (self._context.socket(zmq.ROUTER), self._context.socket(zmq.PULL))
        self._sockets[0].bind(self.front_end.input_address)
        self._sockets[1].bind(self.front_end.output_address)
        self.model = make_tiny_model_dir(directory / "model")

    def _on_message(self, identity: bytes, message: Message) -> None:
        if isinstance(message, RankLog):
            show(message)
        self.received.append(message)

    def launch(self, rank: int = 0, *, fault: str = "", epoch: int = 1) -> EngineLaunch:
        return EngineLaunch(
            rank=rank,
            epoch=epoch,
            local_rank=rank,
            config=EngineConfig(model=str(self.model), engine="simulated", simulated=SimulatedConfig(fault=fault)),
            control_address=self.control.address,
            front_ends=(self.front_end,),
            transport=self._transport,
        )

    async def until(self, kind: type[M], rank: int = 0) -> M:
        """The first message of this kind from that rank."""
        found: list[M] = []

        def look() -> bool:
            found.extend(m for m in self.received if isinstance(m, kind) and m.rank_id.rank == rank)  # type: ignore[union-attr]
            return bool(found)

        await poll_until(look, f"{kind.__name__} of rank {rank}")
        return found[0]

    def close(self) -> None:
        self.control.close()
        self._context.destroy(linger=0)


async def poll_until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(int(DEADLINE_S / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"{what}: not within {DEADLINE_S:g} s")


class RankLauncherContract:
    @pytest.fixture
    def directory(self) -> Iterator[Path]:
        # Not pytest's: its paths are longer than a Unix socket's may be.
        with tempfile.TemporaryDirectory(prefix="gw-test-", dir="/tmp") as name:
            yield Path(name)

    @pytest.fixture(autouse=True)
    def no_thread_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever runs the tests may have some, and a rank would get them."""
        for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
            monkeypatch.delenv(name, raising=False)

    @pytest.fixture
    async def place(self, directory: Path) -> AsyncIterator[Workplace]:
        place = Workplace(directory)
        yield place
        place.close()

    async def test_started_rank_says_ready_and_its_process_is_the_one_in_the_handle(
        self, launcher: RankLauncher, place: Workplace
    ) -> None:
        handle = await launcher.start(place.launch())
        ready = await place.until(EngineReady)
        assert ready.rank_id == RankId(0, 1)
        assert (ready.pid, ready.node) == (handle.pid, handle.node)

    async def test_two_ranks_run_side_by_side_in_processes_of_their_own(self, launcher: RankLauncher, place: Workplace) -> None:
        handles = await asyncio.gather(launcher.start(place.launch(0)), launcher.start(place.launch(1)))
        await place.until(EngineReady, 0)
        await place.until(EngineReady, 1)
        assert handles[0].pid != handles[1].pid

    async def test_ordered_end_has_no_cause(self, launcher: RankLauncher, place: Workplace) -> None:
        handle = await launcher.start(place.launch())
        await place.until(EngineReady)
        assert place.control.send(RankId(0, 1).identity, Shutdown(0.0))
        end = await asyncio.wait_for(handle.wait(), DEADLINE_S)
        assert (end.cause, end.abrupt) == ("", False)
        assert not psutil.pid_exists(handle.pid or 0)

    async def test_kill_9_is_an_abrupt_end_that_names_the_process(self, launcher: RankLauncher, place: Workplace) -> None:
        handle = await launcher.start(place.launch())
        await place.until(EngineReady)
        assert handle.pid is not None
        os.kill(handle.pid, signal.SIGKILL)
        end = await asyncio.wait_for(handle.wait(), DEADLINE_S)
        assert end.abrupt
        assert str(handle.pid) in end.cause

    async def test_death_while_loading_gives_last_words_and_an_end_that_is_not_abrupt(
        self, launcher: RankLauncher, place: Workplace
    ) -> None:
        handle = await launcher.start(place.launch(fault="raise_at_step=0"))
        dead = await place.until(EngineCoreDead)
        end = await asyncio.wait_for(handle.wait(), DEADLINE_S)
        assert "simulated fault at step 0" in dead.cause
        assert "Traceback" in dead.cause
        assert "code 1" in end.cause
        assert not end.abrupt

    async def test_sigterm_ends_a_rank_that_computes_for_ever(self, launcher: RankLauncher, place: Workplace) -> None:
        handle = await launcher.start(place.launch(fault="stall_at_step=0"))
        assert handle.pid is not None
        os.kill(handle.pid, signal.SIGTERM)
        assert (await asyncio.wait_for(handle.wait(), DEADLINE_S)).cause

    async def test_kill_ends_the_process_and_may_be_repeated(self, launcher: RankLauncher, place: Workplace) -> None:
        handle = await launcher.start(place.launch(fault="stall_at_step=0"))
        await asyncio.wait_for(handle.kill(), DEADLINE_S)
        await handle.kill()
        assert not psutil.pid_exists(handle.pid or 0)
        assert (await handle.wait()).abrupt

    async def test_many_may_wait_and_one_that_gives_up_harms_nobody(self, launcher: RankLauncher, place: Workplace) -> None:
        handle = await launcher.start(place.launch())
        impatient, patient = asyncio.create_task(handle.wait()), asyncio.create_task(handle.wait())
        await place.until(EngineReady)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        assert not patient.done()
        await handle.kill()
        assert (await asyncio.wait_for(patient, DEADLINE_S)).cause

    async def test_close_leaves_no_process(self, launcher: RankLauncher, place: Workplace) -> None:
        handles = [await launcher.start(place.launch(rank)) for rank in (0, 1)]
        await place.until(EngineReady, 1)
        await launcher.close()
        assert [psutil.pid_exists(handle.pid or 0) for handle in handles] == [False, False]

    async def test_output_of_a_rank_is_forwarded_under_its_name(
        self, launcher: RankLauncher, place: Workplace, capsys: pytest.CaptureFixture[str]
    ) -> None:
        handle = await launcher.start(place.launch(7, fault="raise_at_step=0"))
        await asyncio.wait_for(handle.wait(), DEADLINE_S)
        lines = capsys.readouterr().err.splitlines()
        assert any(line.startswith("[rank 7]") and "simulated fault" in line for line in lines)
