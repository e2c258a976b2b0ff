"""One client with 4 kB socket buffers reads slowly while 200 others stream: what it costs them, and the server's memory.

A real front end and engine client, in this process so that its buffers can be looked into; two simulated ranks: the 200 share
one at 25 ms a step, the slow reader has the other to itself and is sent 20,000 tokens at 1 ms each. Runs with and without it
take turns.

Exit code 0 only if every token reached the slow reader in fewer chunks than tokens, what the process kept for it (transport and
collector) stayed below 256 kB, and the others' p99 between tokens was at most 1.2 times that of the run without it (medians).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from cores.config import EngineConfig, SimulatedConfig
from cores.testing import make_tiny_model_dir
from gateway import AsyncLLM, GatewayConfig
from gateway.config import ParallelConfig, ServerConfig
from gateway.outputs import RequestOutput
from gateway.server.app import run_server
from gateway.server.state import ServerState
from scripts.benchmarks.load import LoadResult, closed_loop, percentile
from scripts.benchmarks.report import Row, publish

NUM_OTHERS, OTHERS_TOKENS = 200, 900
SLOW_TOKENS = 20_000
STEP_MS, SEQ_US = 1.0, 120.0  # 25 ms for the 200, 1.1 ms for the one
BUFFER_BYTES = 4096
READ_BYTES, READ_INTERVAL_S = 1024, 0.025  # 40 kB/s, where the stream, event by event, would be 170 kB/s
MAX_KEPT_BYTES = 256_000
MAX_RATIO = 1.2
LOOK_INTERVAL_S = 0.02
PATH = "/v1/completions"
_PIECE = re.compile(rb'"text":("(?:[^"\\]|\\.)*")')


# --- the slow reader, in a process of its own -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlowResult:
    local_port: int
    num_chunks: int
    num_tokens: int  # as the usage says
    text: str


def read_slowly(port: int, interval_s: float) -> SlowResult:
    """Prints its port before it sends anything."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        sock.connect(("127.0.0.1", port))
        print(sock.getsockname()[1], flush=True)
        body = json.dumps(slow_body()).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: h\r\nX-Request-Id: slow\r\nX-data-parallel-rank: 1\r\nContent-Length: {len(body)}"
        )
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        data = bytearray()
        while not data.endswith(b"0\r\n\r\n"):
            received = sock.recv(READ_BYTES)
            if not received:
                raise ConnectionError(f"the server hung up after {len(data)} bytes")
            data += received
            time.sleep(interval_s)
        return _result(sock.getsockname()[1], _body(bytes(data)))


def slow_body() -> dict[str, Any]:
    return {
        "prompt": "one two three", "max_tokens": SLOW_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def _body(response: bytes) -> bytes:
    """Without HTTP's own chunks."""
    rest, body = response.partition(b"\r\n\r\n")[2], bytearray()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return bytes(body)


def _result(local_port: int, body: bytes) -> SlowResult:
    chunks = [line for line in body.splitlines() if line.startswith(b'data: {"id"')]
    pieces = [json.loads(match[1]) for chunk in chunks if (match := _PIECE.search(chunk))]
    return SlowResult(local_port, len(chunks), json.loads(chunks[-1][6:])["usage"]["completion_tokens"], "".join(pieces))


# --- the server -------------------------------------------------------------------------------------------------------


class Stage:
    """A front end that listens twice: on a port for everybody, and on one whose connections have small buffers."""

    def __init__(self, llm: AsyncLLM, ports: tuple[int, int], servers: list[Any]) -> None:
        self.llm = llm
        self.port, self.slow_port = ports
        self._servers = servers

    def kept_bytes(self, client_port: int) -> int:
        """For the slow reader: in its transport and in its collector."""
        return self._unsent_bytes(client_port) + self._unread_bytes()

    def _unsent_bytes(self, client_port: int) -> int:
        for protocol in self._servers[1]._runner.server.connections:
            transport = protocol.transport
            if transport is not None and (transport.get_extra_info("peername") or (0, 0))[1] == client_port:
                return int(transport.get_write_buffer_size())
        return 0

    def _unread_bytes(self) -> int:
        streams = self.llm.output_processor._streams.values()
        return sum(deep_size(stream.sink, set()) for stream in streams if stream.external_id == "slow")


def deep_size(thing: Any, seen: set[int]) -> int:
    """Bytes of an object and all that it holds, but for what belongs to the request and not to its reader."""
    if id(thing) in seen or thing is None or isinstance(thing, type | asyncio.Future):
        return 0
    seen.add(id(thing))
    size = sys.getsizeof(thing)
    if isinstance(thing, RequestOutput):
        return size + deep_size(thing.outputs, seen)
    if isinstance(thing, dict):
        return size + sum(deep_size(item, seen) for pair in thing.items() for item in pair)
    if isinstance(thing, list | tuple | set):
        return size + sum(deep_size(item, seen) for item in thing)
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    return size + sum(deep_size(getattr(thing, name, None), seen) for name in slots)


@contextlib.asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_model_dir(Path(directory) / "tiny", max_model_len=32768)
        simulated = SimulatedConfig(step_ms=STEP_MS, seq_us=SEQ_US, prefill_us=0)
        config = GatewayConfig(
            engine=EngineConfig(model=str(model), engine="simulated", simulated=simulated, max_num_seqs=256),
            parallel=ParallelConfig(data_parallel_size=2, data_parallel_backend="mp"),
            server=ServerConfig(served_model_name=("model",)),
        )
        llm = await AsyncLLM.from_config(config)
        state = ServerState(config, llm)
        llm.stats.add("metrics", state.metrics)
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        listeners[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)  # connections inherit it
        ports = (listeners[0].getsockname()[1], listeners[1].getsockname()[1])
        servers = [await run_server(state, listener) for listener in listeners]
        try:
            yield Stage(llm, ports, servers)
        finally:
            for server in servers:
                await server.stop()
            await llm.shutdown()


# --- the measurement --------------------------------------------------------------------------------------------------


async def others(stage: Stage) -> LoadResult:
    bodies = [
        {
            "prompt": f"stream {i}", "max_tokens": OTHERS_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }
        for i in range(NUM_OTHERS)
    ]  # fmt: skip
    return await asyncio.to_thread(closed_loop, stage.port, PATH, bodies, NUM_OTHERS, headers="X-data-parallel-rank: 0")


async def slow_reader(stage: Stage, interval_s: float = READ_INTERVAL_S) -> tuple[SlowResult, int]:
    """Its result, and the most that the process has kept for it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scripts.bench_slow_reader", "--read-from", str(stage.slow_port), "--interval", str(interval_s),
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    client_port, most = int(await process.stdout.readline()), 0
    reading = asyncio.create_task(process.stdout.read())
    while not reading.done():
        most = max(most, stage.kept_bytes(client_port))
        await asyncio.sleep(LOOK_INTERVAL_S)
    return SlowResult(**json.loads(await reading)), most


@dataclass(frozen=True, slots=True)
class Pair:
    """One run without and one with the slow reader."""

    itl_p99_ms: float
    itl_p99_beside_ms: float
    kept_bytes: int
    num_chunks: int
    is_whole: bool

    @property
    def ratio(self) -> float:
        return self.itl_p99_beside_ms / self.itl_p99_ms


async def measure(num_runs: int) -> list[Pair]:
    pairs = []
    async with stage() as server:
        undisturbed, _ = await slow_reader(server, interval_s=0.0)
        for _ in range(num_runs):
            alone = await others(server)
            beside, (slow, kept_bytes) = await asyncio.gather(others(server), slow_reader(server))
            p99_s = [percentile(result.itl_s, 0.99) for result in (alone, beside)]
            is_whole = slow.num_tokens == SLOW_TOKENS and slow.text == undisturbed.text
            pairs.append(Pair(1e3 * p99_s[0], 1e3 * p99_s[1], kept_bytes, slow.num_chunks, is_whole))
            print(f"{pairs[-1]}, ratio {pairs[-1].ratio:.2f}", file=sys.stderr, flush=True)
    return pairs


def rows_of(pairs: list[Pair]) -> list[Row]:
    without = "without the slow reader"
    return [
        Row(
            "others' p99 between tokens", median(p.itl_p99_beside_ms for p in pairs), without,
            median(p.itl_p99_ms for p in pairs), median(p.ratio for p in pairs), "ms",
        ),
        Row("kept for the slow reader, at most", max(p.kept_bytes for p in pairs) / 1000, "–", None, None, "kB"),
        Row("chunks that it got", median(p.num_chunks for p in pairs), "tokens that it was sent", SLOW_TOKENS, None, "1"),
    ]  # fmt: skip


def faults(pairs: list[Pair]) -> list[str]:
    found = []
    if not all(pair.is_whole for pair in pairs):
        found.append("the slow reader did not get every token")
    if any(pair.num_chunks >= SLOW_TOKENS for pair in pairs):
        found.append("nothing was merged for the slow reader")
    if (kept := max(pair.kept_bytes for pair in pairs)) >= MAX_KEPT_BYTES:
        found.append(f"{kept} bytes were kept for the slow reader, {MAX_KEPT_BYTES} are allowed")
    if (ratio := median(pair.ratio for pair in pairs)) > MAX_RATIO:
        found.append(f"the others' p99 was {ratio:.2f} times that without the slow reader, {MAX_RATIO} is allowed")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench_slow_reader", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="pairs; medians count (default: 5)")
    parser.add_argument("--read-from", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--interval", type=float, default=READ_INTERVAL_S, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read_from is not None:
        print(json.dumps(asdict(read_slowly(args.read_from, args.interval))))
        return 0
    pairs = uvloop.run(measure(args.runs))
    publish(rows_of(pairs), args.runs, args.json)
    for fault in (found := faults(pairs)):
        print(f"bench_slow_reader: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
