"""A thousand malformed frames into each socket of a running system: all are dropped and counted, and nothing else happens."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from cores.codec import encode
from cores.config import UNIX_SOCKETS, SimulatedConfig
from cores.control_messages import FrontEndFailed
from cores.gaps import numbered
from cores.testing import make_request
from gateway.launch.control import ControlSocket
from tests.cores.malformed_frames import malformed_frames
from tests.cores.test_codec import SAMPLES
from tests.integration.engine_core_harness import EngineHarness
from tests.integration.llm_harness import FINAL_ONLY, Start, collect, params, until

NUM_FRAMES = 1000


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path: an ipc address has room for about a hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as path:
        yield Path(path)


def frames(seed: int) -> Iterator[bytes]:
    return malformed_frames(SAMPLES, NUM_FRAMES, random.Random(seed))


def test_a_rank_drops_them_and_serves_the_next_request(directory: Path, model: Path) -> None:
    engine = EngineHarness(directory, model)
    try:
        engine.start_ready(SimulatedConfig(step_ms=1.0))
        front_end = engine.front_end
        for number, frame in enumerate(frames(1)):
            front_end.send_raw(frame)
            if number % 100 == 0:  # also in the middle of its work
                front_end.add(make_request(number, max_tokens=5))
        front_end.receive_until(lambda: len(front_end.finished) == NUM_FRAMES // 100)
        assert {len(tokens) for tokens in front_end.tokens.values()} == {5}
        engine.shut_down(10.0)
        assert engine.wait_exit() == 0
        assert "dropped a frame from front end 0" in engine.stderr()
    finally:
        engine.close()


async def test_a_front_end_counts_them_on_both_of_its_sockets_and_serves_the_next_request(start: Start) -> None:
    llm = await start(2)
    place = llm.core_client.place
    with zmq.Context() as context:
        for name, kind in (("in", zmq.DEALER), ("out", zmq.PUSH)):
            before = llm.core_client.num_malformed_frames
            with context.socket(kind) as stranger:
                stranger.setsockopt(zmq.LINGER, -1)
                stranger.connect(UNIX_SOCKETS.address(place.run_directory, f"fe{place.index}-{name}"))
                for number, frame in enumerate(frames(2)):
                    stranger.send_multipart(numbered(number, frame) if kind == zmq.PUSH else [frame])
                await until(
                    lambda before=before: llm.core_client.num_malformed_frames == before + NUM_FRAMES, "all are counted"
                )
    (final,) = await collect(llm, "one two", params(9, output_kind=FINAL_ONLY))
    assert len(final.outputs[0].token_ids) == 9
    assert [rank.deaths for rank in llm.status().ranks] == [0, 0]
    assert llm.status().totals.malformed_frames == 2 * NUM_FRAMES


async def test_the_launchers_control_socket_counts_them_and_hears_what_comes_after(directory: Path) -> None:
    heard = []
    control = ControlSocket(lambda _, message: heard.append(message))
    control.start(f"ipc://{directory}/control")
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.IDENTITY, b"front-end-0")
        peer.setsockopt(zmq.LINGER, -1)
        peer.connect(control.address)
        for frame in frames(3):
            peer.send(frame)
        peer.send(encode(FrontEndFailed(0, "true")))
        await until(lambda: heard == [FrontEndFailed(0, "true")], "what comes after is heard")
        assert control.num_malformed == NUM_FRAMES
    control.close()
