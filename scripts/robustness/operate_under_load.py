"""What operators do to a group that serves so many requests a second, and what its clients notice: nothing may fail.

All ranks are restarted one after the other; then the group grows and shrinks, by default 4 → 8 → 3 → 16 → 3. Requests come at
their times, whatever the server does, each of a stream with a prompt of its own.

    python -m scripts.robustness.operate_under_load

Exit code 0 only if no request failed and the group is what was ordered in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field

import aiohttp

from scripts.benchmarks import servers
from scripts.robustness.common import Answer, client_session, every, simulated_server, status_of, stream, summary_ms, url_of

COSTS = ["step_ms=15", "prefill_us=20", "seq_us=50"]
MAX_TOKENS, PROMPT_WORDS = 16, 60
DRAIN_TIMEOUT_S = 5.0
QUIET_S = 3.0  # of plain load, before, between and after


@dataclass
class Phase:
    name: str
    duration_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    def line(self) -> str:
        failed = sum(not answer.is_whole for answer in self.answers)
        whole = [answer for answer in self.answers if answer.is_whole]
        moved = sum(answer.num_moves > 0 for answer in whole)
        head = f"{self.name:<14} {self.duration_s:5.1f} s  {len(self.answers):5d} requests  {failed} failed  {moved:3d} moved"
        return f"{head}  first token {summary_ms([answer.ttft_s for answer in whole])}"


class Load:
    """Requests at a fixed rate; each belongs to the phase in which it was sent."""

    def __init__(self, url: str, rate: float) -> None:
        self.phases: list[Phase] = []
        self._url = url
        self._rate = rate
        self._requests: set[asyncio.Task[None]] = set()

    async def run(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        async for number in every(1.0 / self._rate, float("inf")):
            if stop.is_set():
                break
            task = asyncio.create_task(self._ask(session, number, self.phases[-1]))
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
        await asyncio.gather(*self._requests)

    async def _ask(self, session: aiohttp.ClientSession, number: int, phase: Phase) -> None:
        phase.answers.append(await stream(session, self._url, PROMPT_WORDS, MAX_TOKENS, number))


async def order(session: aiohttp.ClientSession, url: str, path: str, **fields: float) -> None:
    async with session.post(f"{url}{path}", json={"drain_timeout": DRAIN_TIMEOUT_S, **fields}) as response:
        if response.status != 200:
            raise SystemExit(f"{path}: HTTP {response.status}: {await response.text()}")


async def measure(url: str, args: argparse.Namespace) -> tuple[list[Phase], list[str]]:
    load, stop = Load(url, args.rate), asyncio.Event()

    async with client_session() as session:

        async def phase(name: str, *orders: tuple[str, dict[str, float]]) -> None:
            load.phases.append(Phase(name))
            start_s = time.monotonic()
            for path, fields in orders:
                await order(session, url, path, **fields)
            if not orders:
                await asyncio.sleep(QUIET_S)
            load.phases[-1].duration_s = time.monotonic() - start_s

        load.phases.append(Phase("start"))
        running = asyncio.create_task(load.run(session, stop))
        await phase("quiet")
        await phase("restart all", *((f"/admin/ranks/{rank}/restart", {}) for rank in range(args.sizes[0])))
        for size in args.sizes[1:]:
            await phase(f"scale to {size}", ("/scale_elastic_ep", {"new_data_parallel_size": size}))
            await phase(f"{size} ranks")
        stop.set()
        await running
        ranks = (await status_of(session, url))["ranks"]
    return load.phases[1:], [row["state"] for row in ranks]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 3, 16, 3])
    args = parser.parse_args()
    servers.end_in_order_on_sigterm()
    with simulated_server(args.sizes[0], COSTS) as server:
        phases, states = asyncio.run(measure(url_of(server), args))
    print(*(phase.line() for phase in phases), sep="\n")
    answers = [answer for phase in phases for answer in phase.answers]
    broken = [answer.error for answer in answers if not answer.is_whole]
    print(f"{len(answers)} requests, {len(broken)} failed; ranks in the end: {', '.join(states)}")
    print(*broken[:5], sep="\n")
    return 0 if not broken and states == ["ready"] * args.sizes[-1] else 1


if __name__ == "__main__":
    sys.exit(main())
