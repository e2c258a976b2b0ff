"""Ranks are killed under streams, one after the other: how soon is it noticed, and how long is the pause that a client sees?

Noticed: from `kill -9` to the death in the front end's event log; both use the machine's monotonic clock. The pause is from
the kill to the next token of a stream that was on the rank. It has a part that nobody can save: the survivors compute again
what the rank had cached. That is the tokens of all streams that moved, over the speed that the survivors measure of themselves.

    python -m scripts.robustness.failover_pause                # simulated ranks, local processes
    python -m scripts.robustness.failover_pause --backend ray

Exit code 0 only if every stream came whole, every death was noticed within 100 ms, and the 99th percentile of the pauses is at
most 1 s longer than the longest computing again.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from scripts.benchmarks import servers
from scripts.benchmarks.load import percentile
from scripts.robustness.common import Answer, client_session, simulated_server, status_of, stream, summary_ms, url_of

COSTS = ["step_ms=15", "prefill_us=100", "seq_us=50"]
MAX_NOTICE_S, MAX_PAUSE_S = 0.1, 1.0
READING_S = 0.05  # from the front end's notice of a death to the last token of that rank in this client
HEALING_TIMEOUT_S = 60.0
STREAM_TOKENS = (100, 300)


@dataclass
class Kill:
    rank: int
    at_s: float
    notice_s: float
    survivors_tokens_per_s: float
    moved: list[Answer] = field(default_factory=list)

    @property
    def recompute_s(self) -> float:
        tokens = sum(answer.num_prompt_tokens + sum(t < self.at_s for t in answer.times_s) for answer in self.moved)
        return tokens / self.survivors_tokens_per_s

    @property
    def pauses_s(self) -> list[float]:
        return [pause for answer in self.moved if (pause := self._pause(answer)) is not None]

    def _pause(self, answer: Answer) -> float | None:
        """To the token behind the longest gap that begins before all that the rank had sent has been read."""
        read_s = self.at_s + self.notice_s + READING_S
        gaps = [(b - a, b) for a, b in itertools.pairwise(answer.times_s) if a < read_s and b > self.at_s]
        return max(gaps)[1] - self.at_s if gaps else None


async def kill_ranks(session: aiohttp.ClientSession, url: str, num_kills: int, rng: random.Random) -> list[Kill]:
    kills: list[Kill] = []
    while len(kills) < num_kills:
        ready = await ready_ranks(session, url)
        await asyncio.sleep(rng.uniform(0.5, 1.5))  # streams get going on all
        victim = rng.choice(ready)
        speed = sum(row["prefill_speed_tokens_per_s"] for row in ready if row["rank"] != victim["rank"])
        killed_s = time.monotonic()
        os.kill(victim["pid"], signal.SIGKILL)
        kills.append(Kill(victim["rank"], killed_s, await notice(session, url, victim, killed_s), speed))
    await ready_ranks(session, url)
    return kills


async def ready_ranks(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    """All of them, once all are ready and have measured how fast they are."""
    deadline_s = time.monotonic() + HEALING_TIMEOUT_S
    while time.monotonic() < deadline_s:
        ranks: list[dict[str, Any]] = (await status_of(session, url))["ranks"]
        if all(row["state"] == "ready" and row["prefill_speed_tokens_per_s"] > 0 for row in ranks):
            return ranks
        await asyncio.sleep(0.1)
    raise SystemExit(f"the group is not whole again: {[(row['rank'], row['state']) for row in ranks]}")


async def notice(session: aiohttp.ClientSession, url: str, victim: dict[str, Any], killed_s: float) -> float:
    """How long it took until the front end knew."""
    while time.monotonic() < killed_s + HEALING_TIMEOUT_S:
        status, now = await status_of(session, url), time.monotonic()
        for event in status["events"]:
            if (event["kind"], event["rank"], event["epoch"]) == ("death", victim["rank"], victim["epoch"]):
                return max(0.0, now - event["age_s"] - killed_s)
        await asyncio.sleep(0.02)
    raise SystemExit(f"the death of rank {victim['rank']} was never noticed")


async def measure(url: str, args: argparse.Namespace) -> tuple[list[Answer], list[Kill]]:
    rng, seeds, stop = random.Random(args.seed), itertools.count(), asyncio.Event()
    answers: list[Answer] = []

    async def keep_streaming(session: aiohttp.ClientSession) -> None:
        while not stop.is_set():
            answers.append(await stream(session, url, args.prompt_words, rng.randint(*STREAM_TOKENS), next(seeds)))

    async with client_session() as session:
        workers = [asyncio.create_task(keep_streaming(session)) for _ in range(args.streams)]
        kills = await kill_ranks(session, url, args.kills, rng)
        stop.set()
        await asyncio.gather(*workers)
    return answers, kills


def assign(answers: list[Answer], kills: list[Kill]) -> None:
    """Each stream that moved once to the first kill of its rank in its time. Of those that moved twice the second place is
    unknown: they count as whole or not, and in no pause."""
    for answer in answers:
        if answer.is_whole and answer.num_moves == 1:
            met = (k for k in kills if k.rank == answer.rank and answer.times_s[0] < k.at_s < answer.end_s)
            if (kill := next(met, None)) is not None:
                kill.moved.append(answer)


def report(answers: list[Answer], kills: list[Kill]) -> bool:
    assign(answers, kills)
    broken = [answer for answer in answers if not answer.is_whole]
    pauses = [pause for kill in kills for pause in kill.pauses_s]
    notices, recomputes = [kill.notice_s for kill in kills], [kill.recompute_s for kill in kills if kill.moved]
    print(f"{len(answers)} streams, {len(broken)} not whole; {len(kills)} kills, {sum(a.num_moves for a in answers)} moves")
    print(f"death noticed: {summary_ms(notices)}")
    print(f"pause, kill to next token, of {len(pauses)} streams: {summary_ms(pauses)}")
    print(f"computing again what moved with a kill: {summary_ms(recomputes)}")
    print(*(answer.error for answer in broken[:5]), sep="\n")
    is_quick = percentile(pauses, 0.99) <= MAX_PAUSE_S + max(recomputes, default=0.0)
    return not broken and bool(pauses) and max(notices) <= MAX_NOTICE_S and is_quick


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("mp", "ray"), default="mp")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--prompt-words", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    servers.end_in_order_on_sigterm()
    flags = ("--engine-restarts", "1000", "--data-parallel-backend", args.backend)
    with simulated_server(args.ranks, COSTS, *flags) as server:
        answers, kills = asyncio.run(measure(url_of(server), args))
    return 0 if report(answers, kills) else 1


if __name__ == "__main__":
    sys.exit(main())
