"""The other side of an `EngineCoreProc` child: a launcher's control socket and fake front ends, over real ipc sockets."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import zmq

from cores.codec import Message, decode, encode
from cores.config import EngineConfig, EngineLaunch, FrontEndAddress, SimulatedConfig, to_plain
from cores.control_messages import AttachFrontEnd, Shutdown
from cores.gaps import seq_before_life, split_number
from cores.messages import (
    AbortRequests,
    AddRequest,
    EngineCoreDead,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    Finished,
    UtilityCall,
)

M = TypeVar("M", bound=Message)

DEADLINE_S = 90.0


class FakeFrontEnd:
    """Binds a front end's two sockets, sends commands and keeps everything that comes back."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path, index: int, life: int = 1) -> None:
        self.address = FrontEndAddress(
            index=index, input_address=f"ipc://{directory}/in-{index}", output_address=f"ipc://{directory}/out-{index}"
        )
        self.commands = context.socket(zmq.ROUTER)
        self.outputs = context.socket(zmq.PULL)
        self.commands.bind(self.address.input_address)
        self.outputs.bind(self.address.output_address)
        self.received: list[Message] = []
        self.num_frames = 0
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.last_step_of: dict[int, int] = {}
        self._seq = self.seq_before = seq_before_life(life)
        self._identity = b""

    def receive(self, timeout_s: float = DEADLINE_S) -> Message:
        """The next message on the output socket, booked."""
        assert self.outputs.poll(timeout_s * 1e3), f"nothing came within {timeout_s} s"
        number, frame = split_number(self.outputs.recv_multipart())
        self.num_frames += 1
        assert number == self.num_frames, "frames come in order and none is missing"
        message = decode(frame)
        self.received.append(message)
        if isinstance(message, EngineCoreOutputs):
            self._book(message)
        return message

    def _book(self, outputs: EngineCoreOutputs) -> None:
        position = 0
        for row, handle in enumerate(outputs.handles):
            assert handle not in self.finished, f"outputs for {handle} after its end"
            count = 1 if outputs.counts is None else outputs.counts[row]
            self.tokens.setdefault(handle, []).extend(outputs.token_ids[position : position + count])
            self.last_step_of[handle] = outputs.step
            position += count
            if row in outputs.finished:
                self.finished[handle] = outputs.finished[row]

    def receive_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            self.receive()

    def receive_one(self, kind: type[M]) -> M:
        """The next message of this type; others are booked on the way."""
        self.receive_until(lambda: bool(self.received) and isinstance(self.received[-1], kind) and self._is_new())
        message = self.received[-1]
        assert isinstance(message, kind)
        self._returned = message
        return message

    _returned: Message | None = None

    def _is_new(self) -> bool:
        return self.received[-1] is not self._returned

    def wait_ready(self) -> EngineReady:
        assert self.commands.poll(DEADLINE_S * 1e3), "no EngineReady"
        self._identity, frame = self.commands.recv_multipart()
        ready = decode(frame)
        assert isinstance(ready, EngineReady)
        return ready

    def close(self) -> None:
        self.commands.close(linger=0)
        self.outputs.close(linger=0)

    def send_raw(self, *frames: bytes) -> None:
        self.commands.send_multipart([self._identity, *frames])

    def add(self, request: EngineCoreRequest) -> int:
        self._seq += 1
        self.send_raw(encode(AddRequest(self._seq, request)))
        return self._seq

    def abort(self, *handles: int) -> int:
        self._seq += 1
        self.send_raw(encode(AbortRequests(self._seq, handles)))
        return self._seq

    def call(self, method: str, *args: object) -> int:
        self._seq += 1
        self.send_raw(encode(UtilityCall(self._seq, 1000 + self._seq, method, args)))
        return 1000 + self._seq


@dataclass
class EngineHarness:
    """One rank's launcher and its front ends."""

    directory: Path
    model: Path
    num_front_ends: int = 1
    rank: int = 0
    epoch: int = 1
    front_ends: list[FakeFrontEnd] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control = self.context.socket(zmq.ROUTER)
        self.control_address = f"ipc://{self.directory}/control"
        self.control.bind(self.control_address)
        self.front_ends = [FakeFrontEnd(self.context, self.directory, i) for i in range(self.num_front_ends)]

    @property
    def front_end(self) -> FakeFrontEnd:
        return self.front_ends[0]

    def launch_config(self, simulated: SimulatedConfig | None = None, **config: object) -> EngineLaunch:
        settings = {"model": str(self.model), "engine": "simulated", "simulated": simulated or SimulatedConfig(step_ms=1.0)}
        return EngineLaunch(
            rank=self.rank,
            epoch=self.epoch,
            local_rank=0,
            config=EngineConfig(**(settings | config)),  # type: ignore[arg-type]  # keyword values of several types
            control_address=self.control_address,
            front_ends=tuple(f.address for f in self.front_ends),
        )

    def start(self, simulated: SimulatedConfig | None = None, **config: object) -> None:
        launch = self.launch_config(simulated, **config)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cores.engine_core_proc"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(to_plain(launch)).encode() + b"\n")
        self.process.stdin.flush()

    def start_ready(self, simulated: SimulatedConfig | None = None, **config: object) -> EngineReady:
        self.start(simulated, **config)
        for front_end in self.front_ends:
            ready = front_end.wait_ready()
        return ready

    def attach_new_front_end(self) -> FakeFrontEnd:
        """Front end 0 dies and comes back as another process would, with sockets of its own."""
        self.front_ends[0].close()
        directory = self.directory / "second-life"
        directory.mkdir()
        front_end = self.front_ends[0] = FakeFrontEnd(self.context, directory, 0, life=2)
        address = front_end.address
        self._send_control(AttachFrontEnd(0, address.input_address, address.output_address))
        return front_end

    def receive_control(self, kind: type[M]) -> M:
        """The next control message of this type; others are passed over."""
        while True:
            assert self.control.poll(DEADLINE_S * 1e3), f"no {kind.__name__} on the control socket"
            identity, frame = self.control.recv_multipart()
            assert identity == f"rank-{self.rank}-{self.epoch}".encode()
            message = decode(frame)
            if isinstance(message, kind):
                return message

    def shut_down(self, timeout_s: float) -> None:
        self._send_control(Shutdown(timeout_s))

    def _send_control(self, message: Message) -> None:
        self.control.send_multipart([f"rank-{self.rank}-{self.epoch}".encode(), encode(message)])

    def wait_exit(self) -> int:
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def stderr(self) -> str:
        """All that the process has said; it has ended."""
        assert self.process is not None
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def dead_frames(self) -> list[EngineCoreDead]:
        return [m for f in self.front_ends for m in f.received if isinstance(m, EngineCoreDead)]

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
            for pipe in (self.process.stdin, self.process.stderr):
                assert pipe is not None
                pipe.close()
        self.context.destroy(linger=0)
