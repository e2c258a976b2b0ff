"""A group of four ranks under load, and everything that can happen to it, in a random order that a seed repeats.

Ranks are killed, stopped, drained, restarted by order, added and removed; clients leave, read slowly, and come in bursts. Every
answer is compared with the undisturbed one. In the end the group is whole and idle again, and the processes that have seen all
of it hold no more than before. Exit code 0 only if all of it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil

from scripts.checked_load import Client, Expected, Tally, make_pool, wait_until_idle
from scripts.checked_server import checked_server, start_clients, verdict

NUM_RANKS = 4
SIZES = (2, 3, 5, 6)  # that it is scaled to
NUM_PROMPTS = 32
NUM_WORKERS = 24
BURST = 64  # clients that come at once
STALL_TIMEOUT_S = 2.0
PAUSE_S = (0.5, 2.5)  # between two events
HEALING_TIMEOUT_S = 120.0
MAX_MORE_FILES, MAX_MORE_MIB = 16, 64.0  # than before, in the launcher or its front end


class Chaos:
    """What happens to the group at `url`."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, rng: random.Random, pool: list[Expected], tally: Tally
    ) -> None:
        self.events: Counter[str] = Counter()
        self._url = url
        self._session = session
        self._rng = rng
        self._pool = pool
        self._tally = tally

    async def run(self, until_s: float) -> None:
        kinds: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.kill, 4), (self.stall, 1), (self.pause, 2), (self.drain, 2), (self.restart, 3), (self.scale, 2),
            (self.burst, 1),
        ]  # fmt: skip
        events, weights = zip(*kinds, strict=True)
        while time.monotonic() < until_s:
            event = self._rng.choices(events, weights)[0]
            await event()
            self.events[event.__name__] += 1
            await asyncio.sleep(self._rng.uniform(*PAUSE_S))

    async def kill(self) -> None:
        await self._signal(signal.SIGKILL)

    async def stall(self) -> None:
        """It is found out by its lack of progress, killed and replaced."""
        await self._signal(signal.SIGSTOP)

    async def pause(self) -> None:
        """Short enough to be forgiven."""
        pid = await self._signal(signal.SIGSTOP)
        await asyncio.sleep(STALL_TIMEOUT_S / 4)
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, signal.SIGCONT)

    async def drain(self) -> None:
        rank = await self._ready_rank()
        if rank is not None:
            await self._order(f"/admin/ranks/{rank['rank']}/drain")
            await asyncio.sleep(0.5)
            await self._order(f"/admin/ranks/{rank['rank']}/undrain")

    async def restart(self) -> None:
        rank = await self._ready_rank()
        if rank is not None:
            await self._order(f"/admin/ranks/{rank['rank']}/restart", drain_timeout=self._rng.choice((0.0, 0.2, 5.0)))

    async def scale(self) -> None:
        await self._order("/scale_elastic_ep", new_data_parallel_size=self._rng.choice(SIZES), drain_timeout=0.2)

    async def burst(self) -> None:
        clients = [Client(self._url, random.Random(self._rng.random()), self._pool, self._tally) for _ in range(BURST)]
        await asyncio.gather(*(client.stream(self._rng.choice(self._pool), 20) for client in clients))

    async def heal(self) -> None:
        """Until all ranks that there should be are ready."""
        deadline_s = time.monotonic() + HEALING_TIMEOUT_S
        while time.monotonic() < deadline_s:
            ranks = await self._ranks()
            for rank in ranks:
                if rank["state"] == "draining":
                    await self._order(f"/admin/ranks/{rank['rank']}/undrain")
            if len(ranks) != NUM_RANKS:
                await self._order("/scale_elastic_ep", new_data_parallel_size=NUM_RANKS)
            elif all(rank["state"] == "ready" for rank in ranks):
                return
            await asyncio.sleep(0.2)
        self._tally.faults.append(f"the group is not whole again: {[(r['rank'], r['state']) for r in await self._ranks()]}")

    async def _signal(self, number: signal.Signals) -> int | None:
        """To a rank beside which others are ready."""
        rank = await self._ready_rank()
        if rank is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank["pid"], number)
        return int(rank["pid"])

    async def _ready_rank(self) -> dict[str, Any] | None:
        ready = [rank for rank in await self._ranks() if rank["state"] == "ready"]
        return self._rng.choice(ready) if len(ready) > 1 else None

    async def _ranks(self) -> list[dict[str, Any]]:
        return list((await self.status())["ranks"])

    async def status(self) -> dict[str, Any]:
        async with self._session.get(f"{self._url}/status") as response:
            status: dict[str, Any] = await response.json()
            return status

    async def _order(self, path: str, **fields: Any) -> None:
        """409 and 404 are fair answers here: a rank may have died or gone meanwhile, and so is 503 when its next life has."""
        async with self._session.post(self._url + path, json=fields or None) as response:
            if response.status not in (200, 404, 409, 503):
                self._tally.faults.append(f"{path}: HTTP {response.status}: {await response.text()}")
            self.events["order refused"] += response.status != 200


@dataclass(frozen=True)
class Held:
    """What a process that lives through all of it has open, and how large it is."""

    name: str
    num_files: int
    rss_mib: float

    @classmethod
    def by(cls, name: str, pid: int) -> Held:
        process = psutil.Process(pid)
        return cls(name, process.num_fds(), process.memory_info().rss / 2**20)

    def leaks(self, before: Held) -> list[str]:
        is_leak = self.num_files > before.num_files + MAX_MORE_FILES or self.rss_mib > before.rss_mib + MAX_MORE_MIB
        return [f"leak: {before} has become {self}"] if is_leak else []

    def __str__(self) -> str:
        return f"{self.name}: {self.num_files} files, {self.rss_mib:.0f} MiB"


def held(launcher_pid: int, status: dict[str, Any]) -> list[Held]:
    (front_end,) = status["front_ends"]
    return [Held.by("launcher", launcher_pid), Held.by("front end", front_end["pid"])]


async def run(url: str, pid: int, seconds: float, seed: int, tally: Tally) -> tuple[Counter[str], dict[str, Any]]:
    rng = random.Random(seed)
    pool = await make_pool(url, NUM_PROMPTS, rng)
    async with aiohttp.ClientSession() as session:
        chaos = Chaos(url, session, rng, pool, tally)
        before = held(pid, await chaos.status())
        until_s = time.monotonic() + seconds
        clients = start_clients(url, NUM_WORKERS, rng, pool, tally, until_s)
        await chaos.run(until_s)
        await clients.wait()
        await chaos.heal()
        await wait_until_idle(url, tally)
        status = await chaos.status()
    for now, then in zip(held(pid, status), before, strict=True):
        print(f"{then} before; {now.num_files} files, {now.rss_mib:.0f} MiB after")
        tally.faults += now.leaks(then)
    return chaos.events, status


def is_bug(log_line: str) -> bool:
    return "Traceback" in log_line or " CRITICAL " in log_line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tally = Tally()
    flags = ["--stall-timeout", str(STALL_TIMEOUT_S), "--engine-restarts", "100000"]
    with checked_server(tally, NUM_RANKS, 5.0, *flags, is_fault=is_bug) as server:
        events, status = asyncio.run(run(server.url, server.pid, 60 * args.minutes, args.seed, tally))
    print(f"events: {dict(sorted(events.items()))}")
    print(f"{sum(tally.done.values())} answers checked: {dict(sorted(tally.done.items()))}; {tally.blamed} blamed for deaths")
    num_deaths = sum(rank["deaths"] for rank in status["ranks"])
    print(f"{status['totals']['moved']} sequences moved, {num_deaths} deaths of the ranks that are there in the end")
    return verdict(tally)


if __name__ == "__main__":
    sys.exit(main())
