"""A launcher and engine cores as a core client sees them: real sockets, and nobody behind them but the test."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from balancer.load import RoutingRequest
from cores.codec import Message, decode, encode
from cores.config import EngineConfig
from cores.control_messages import FrontEndHello, GroupState, RankRecord, front_end_identity
from cores.gaps import numbered
from cores.messages import EngineCoreOutputs, EngineReady, FirstToken, RankId, RankLoad
from cores.testing import ManualClock, make_request
from gateway.config import BalancerConfig, GatewayConfig, ParallelConfig
from gateway.core_client import AsyncMPClient, core_client_class
from gateway.core_client.base import FrontEndPlace, RanksChanged, Received, SentRequest
from gateway.launch.control import ControlSocket

DEADLINE_S = 60.0


class FakeEngine:
    """One life of a rank, connected to one front end."""

    def __init__(self, context: zmq.asyncio.Context, hello: FrontEndHello, rank_id: RankId) -> None:
        self.rank_id = rank_id
        self._num_said = 0
        self._commands = context.socket(zmq.DEALER)
        self._commands.setsockopt(zmq.IDENTITY, rank_id.identity)
        self._outputs = context.socket(zmq.PUSH)
        for socket, address in ((self._commands, hello.input_address), (self._outputs, hello.output_address)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)

    async def say_ready(self) -> None:
        ready = EngineReady(
            rank_id=self.rank_id, pid=100 + self.rank_id.rank, node="here", device="cpu", max_model_len=100, vocab_size=1000,
            eos_token_ids=(2,), block_size=16, num_kv_blocks=100, max_num_seqs=8, max_num_batched_tokens=64,
        )  # fmt: skip
        await self._commands.send(encode(ready))

    async def command(self) -> Message:
        async with asyncio.timeout(DEADLINE_S):
            return decode(await self._commands.recv())

    async def say(self, message: Message) -> None:
        await self.say_bytes(encode(message))

    async def say_bytes(self, frame: bytes) -> None:
        self._num_said += 1
        await self._outputs.send_multipart(numbered(self._num_said, frame))

    def lose(self, num_messages: int) -> None:
        """As if it had said so much into a connection that broke."""
        self._num_said += num_messages

    def lose_commands(self) -> None:
        """The line for commands breaks, and it does not come back on it."""
        self._commands.close()

    def hang_up(self) -> None:
        self._commands.close()
        self._outputs.close()


class FakeGroup:
    """Everything around one core client of `num_ranks` ranks, whose clock stands still."""

    def __init__(self, directory: Path, num_ranks: int = 2, life: int = 1, **parts: Any) -> None:
        self.clock = ManualClock(1000.0)
        self.said: list[Message] = []  # to the launcher
        self.engines: dict[int, FakeEngine] = {}  # the present lives, by rank
        self._lives: list[FakeEngine] = []
        self._num_ranks = num_ranks
        self._control = ControlSocket(lambda _, message: self.said.append(message))
        self._control.start(f"ipc://{directory / 'control'}")
        self._context = zmq.asyncio.Context()
        parallel = ParallelConfig(data_parallel_size=num_ranks)
        # A policy that watches no caches, unless asked for: the commands that an engine gets are then those of the test alone.
        parts.setdefault("balancer", BalancerConfig(load_balancing_policy="least_tokens"))
        self.config = GatewayConfig(engine=EngineConfig(model="m"), parallel=parallel, **parts)
        place = FrontEndPlace(life=life, run_directory=str(directory), control_address=self._control.address)
        self.client: AsyncMPClient = core_client_class(self.config)(self.config, place, self.clock)
        self._last_handle = 0

    async def start(self) -> None:
        """Returns when all ranks are ready."""
        starting = await self.begin_start()
        for rank in range(self._num_ranks):
            await self.begin_life(RankId(rank, 1))
        async with asyncio.timeout(DEADLINE_S):
            await starting

    async def begin_start(self) -> asyncio.Task[None]:
        """Returns once the launcher knows the client; the task ends when that has its ranks."""
        starting = asyncio.create_task(self.client.start())
        await self.until(lambda: any(isinstance(message, FrontEndHello) for message in self.said))
        return starting

    async def begin_life(self, rank_id: RankId) -> FakeEngine:
        hello = next(message for message in self.said if isinstance(message, FrontEndHello))
        engine = self.engines[rank_id.rank] = FakeEngine(self._context, hello, rank_id)
        self._lives.append(engine)
        await engine.say_ready()
        return engine

    def tell_state(self, *records: RankRecord) -> None:
        self.tell(GroupState(records))

    def tell(self, message: Message) -> None:
        """As the launcher."""
        assert self._control.send(front_end_identity(0), message)

    def add_request(self, num_prompt_tokens: int = 10, pinned_rank: int | None = None) -> tuple[int, RankId | None]:
        """Its handle, and who got it; nobody, if it waits for a rank."""
        handle = self.client.next_handle()
        routing = RoutingRequest(num_prompt_tokens=num_prompt_tokens, pinned_rank=pinned_rank)
        return handle, self.client.add_request(SentRequest(make_request(handle, num_prompt_tokens), routing))

    @staticmethod
    def outputs(rank_id: RankId, step: int, handle: int, command_seq: int = 0) -> EngineCoreOutputs:
        """One token of one request, the first of it in step 0."""
        return EngineCoreOutputs(
            rank_id=rank_id, step=step, command_seq=command_seq, load=RankLoad(num_running=1, num_decodes=1),
            handles=array("I", [handle]), token_ids=array("I", [7]),
            first_tokens={} if step else {0: FirstToken(0, 0.0)},
        )  # fmt: skip

    async def received(self) -> Received:
        """The next news, but for that of ranks that came up."""
        async with asyncio.timeout(DEADLINE_S):
            while isinstance(received := await self.client.get_received(), RanksChanged):
                pass
            return received

    def state(self, rank: int) -> str:
        return self.client.rank_statuses(self.clock())[rank].state

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        await self.client.shutdown()
        for engine in self._lives:
            engine.hang_up()
        self._control.close()
        self._context.destroy(linger=0)
