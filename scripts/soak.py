"""Thousands of requests with random cancels, disconnects, n > 1, stop strings and slow readers; every answer is checked.

Against a real server: two front ends, two ranks, the simulated engine, whose tokens depend on the prompt and the seed alone. So
what a request must answer is known from an undisturbed run at the start. In the end nothing may be left in flight anywhere, and
memory must not have grown. Exit code 0 only if all of that holds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import psutil

from scripts.checked_load import Tally, make_pool, wait_until_idle
from scripts.checked_server import checked_server, start_clients, verdict

NUM_PROMPTS = 48
NUM_WORKERS = 48
# Full within the first third of a minute: an index of cached blocks that still grows would look like a leak.
NUM_KV_BLOCKS = 4096
MAX_GROWTH_MIB_PER_1000 = 1.0  # requests, of any process, after the warm-up
# A rank that is silent for three seconds is suspected: on a machine with other work that is nobody's fault.
EXPECTED_LOG_WORDS = (" INFO ", "nothing heard for", "has been silent for")


@dataclass
class Memory:
    """Resident MiB of each process, over the number of requests done."""

    pids: dict[str, int]
    points: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def read(self, num_requests: int) -> None:
        mib = {name: psutil.Process(pid).memory_info().rss / 2**20 for name, pid in self.pids.items()}
        self.points.append((num_requests, mib))

    def growth(self) -> dict[str, float]:
        """MiB per 1,000 requests: the slope of a straight line through all points from the first third on, as before it caches
        fill."""
        points = self.points[len(self.points) // 3 :]
        return {name: 1000 * slope([(n, mib[name]) for n, mib in points]) for name in self.pids}


def slope(points: Sequence[tuple[float, float]]) -> float:
    """By least squares."""
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


async def soak(url: str, seconds: float, seed: int, tally: Tally) -> Memory:
    rng = random.Random(seed)
    pool = await make_pool(url, NUM_PROMPTS, rng)
    async with aiohttp.ClientSession() as session, session.get(f"{url}/status") as response:
        status = await response.json()
    pids = {f"front end {f['index']}": f["pid"] for f in status["front_ends"]}
    memory = Memory(pids | {f"rank {r['rank']}": r["pid"] for r in status["ranks"]})
    until_s = time.monotonic() + seconds
    clients = start_clients(url, NUM_WORKERS, rng, pool, tally, until_s)
    while time.monotonic() < until_s:
        await asyncio.sleep(min(2.0, seconds / 10))
        memory.read(sum(tally.done.values()))
    await clients.wait()
    await wait_until_idle(url, tally)
    return memory


def is_unexpected(log_line: str) -> bool:
    return not any(word in log_line for word in EXPECTED_LOG_WORDS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tally = Tally()
    flags = ["--api-server-count", "2", "--num-kv-blocks", str(NUM_KV_BLOCKS)]
    with checked_server(tally, 2, 2.0, *flags, is_fault=is_unexpected) as server:
        memory = asyncio.run(soak(server.url, args.seconds, args.seed, tally))
    growth = memory.growth()
    for name, mib in growth.items():
        if mib > MAX_GROWTH_MIB_PER_1000:
            tally.faults.append(f"{name} grew by {mib:.2f} MiB per 1,000 requests")
    print(f"{sum(tally.done.values())} requests in {args.seconds:g} s: {dict(sorted(tally.done.items()))}")
    print("MiB per 1,000 requests:", {name: round(g, 3) for name, g in growth.items()})
    return verdict(tally)


if __name__ == "__main__":
    sys.exit(main())
