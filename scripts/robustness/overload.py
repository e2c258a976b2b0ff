"""Ten times as many requests as a group can serve, for a minute.

First the capacity is found: requests answered per second by so many clients as the ranks run sequences. Then a fair load (80 %
of it), the overload, and the fair load again. Refusals must come early and say when to come again; accepted requests must be as
quick as the limit promises; the front end's loop and memory must stay as they are; afterwards all is as before within seconds.

    python -m scripts.robustness.overload --seconds 60

Exit code 0 only if all requests ended as an answer or a 503 with `Retry-After`, refusals took at most 1 s (p99), accepted ones
got their first token within what the full queue takes (p99), the loop was late by at most 250 ms (p99), the front end grew by
at most 64 MiB, and the first tokens of the load after were at most twice as late as before, from the third second on.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field

import aiohttp

from scripts.benchmarks import servers
from scripts.benchmarks.load import percentile
from scripts.robustness.common import (
    Answer,
    client_session,
    every,
    rss_mib,
    simulated_server,
    status_of,
    stream,
    summary_ms,
    url_of,
)

NUM_RANKS, MAX_NUM_SEQS = 2, 8
COSTS = ["step_ms=20", "prefill_us=20", "seq_us=0"]
MAX_TOKENS, PROMPT_WORDS = 40, 50
QUEUED_LIMIT = 3 * NUM_RANKS * MAX_NUM_SEQS  # one generation that runs, two that wait
FAIR_SHARE, OVERLOAD = 0.8, 10.0
PROBE_S, FAIR_S, RECOVERY_S = 8.0, 10.0, 3.0
MAX_REFUSAL_S, MAX_LAG_MS, MAX_GROWTH_MIB = 1.0, 250.0, 64.0


@dataclass
class Phase:
    answers: list[Answer] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)  # when each of them was over
    lags_ms: list[float] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)

    @property
    def accepted(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.is_whole]

    @property
    def refused(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.status == 503]

    @property
    def refusal_times_s(self) -> list[float]:
        pairs = zip(self.answers, self.ended_s, strict=True)
        return [ended_s - answer.sent_s for answer, ended_s in pairs if answer.status == 503]

    @property
    def broken(self) -> list[str]:
        """Neither an answer nor a refusal that says when to come again."""
        return [
            f"{answer.status} {answer.error}"
            for answer in self.answers
            if not answer.is_whole and (answer.status != 503 or answer.retry_after_s is None)
        ]

    def line(self, name: str) -> str:
        numbers = f"{len(self.accepted)} answered, {len(self.refused)} refused, {len(self.broken)} broken"
        return f"{name}: {numbers}; first token of the answered: {summary_ms([a.ttft_s for a in self.accepted])}"


class Stage:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._number = 0

    async def ask(self, phase: Phase) -> None:
        self._number += 1
        answer = await stream(self._session, self._url, PROMPT_WORDS, MAX_TOKENS, self._number)
        phase.answers.append(answer)
        phase.ended_s.append(time.monotonic())

    async def capacity(self) -> float:
        """Requests a second, by a closed loop that keeps every place taken."""
        phase, until_s = Phase(), time.monotonic() + PROBE_S

        async def client() -> None:
            while time.monotonic() < until_s:
                await self.ask(phase)

        await asyncio.gather(*(client() for _ in range(NUM_RANKS * MAX_NUM_SEQS)))
        start_s = min(answer.sent_s for answer in phase.answers)
        return len(phase.accepted) / (max(phase.ended_s) - start_s)

    async def open_loop(self, rate: float, seconds: float) -> Phase:
        phase, requests = Phase(), set()
        watcher = asyncio.create_task(self._watch(phase))
        async for _ in every(1.0 / rate, time.monotonic() + seconds):
            task = asyncio.create_task(self.ask(phase))
            requests.add(task)
            task.add_done_callback(requests.discard)
        await asyncio.gather(*requests)
        watcher.cancel()
        return phase

    async def _watch(self, phase: Phase) -> None:
        while True:
            (front_end,) = (await status_of(self._session, self._url))["front_ends"]
            phase.lags_ms.append(front_end["event_loop_lag_ms"])
            phase.rss_mib.append(rss_mib(front_end["pid"]))
            await asyncio.sleep(0.5)


async def measure(url: str, seconds: float) -> tuple[float, Phase, Phase, Phase]:
    async with client_session() as session:
        stage = Stage(session, url)
        await stage.capacity()  # warms up
        capacity = await stage.capacity()
        before = await stage.open_loop(FAIR_SHARE * capacity, FAIR_S)
        during = await stage.open_loop(OVERLOAD * capacity, seconds)
        after = await stage.open_loop(FAIR_SHARE * capacity, FAIR_S)
    return capacity, before, during, after


def report(capacity: float, before: Phase, during: Phase, after: Phase) -> bool:
    print(f"capacity {capacity:.1f} requests/s; at most {QUEUED_LIMIT} sequences in flight")
    print(before.line(f"before, {FAIR_SHARE:g} of it"))
    print(during.line(f"during, {OVERLOAD:g} times"))
    print(after.line(f"after, {FAIR_SHARE:g} of it"))
    retry_after = sorted({answer.retry_after_s for answer in during.refused if answer.retry_after_s is not None})
    growth = max(during.rss_mib) - max(before.rss_mib)
    print(f"refused within: {summary_ms(during.refusal_times_s)}; Retry-After {retry_after} s")
    print(f"loop late by at most: p50 {percentile(during.lags_ms, 0.5):.0f} ms, p99 {percentile(during.lags_ms, 0.99):.0f} ms")
    print(f"memory of the front end: {max(before.rss_mib):.0f} MiB before, at most {max(during.rss_mib):.0f} MiB")
    start_s = min(answer.sent_s for answer in after.answers)
    recovered = [answer.ttft_s for answer in after.accepted if answer.sent_s > start_s + RECOVERY_S]
    print(f"first token from {RECOVERY_S:g} s after the overload on: {summary_ms(recovered)}")
    full_queue_s = 2 * QUEUED_LIMIT / capacity
    checks = {
        "all answered or refused with Retry-After": not (before.broken or during.broken or after.broken),
        "refused early": percentile(during.refusal_times_s, 0.99) <= MAX_REFUSAL_S,
        f"accepted within {full_queue_s:.1f} s": percentile([a.ttft_s for a in during.accepted], 0.99) <= full_queue_s,
        "loop in time": percentile(during.lags_ms, 0.99) <= MAX_LAG_MS,
        "memory bounded": growth <= MAX_GROWTH_MIB,
        "recovered": percentile(recovered, 0.5) <= 2 * percentile([a.ttft_s for a in before.accepted], 0.5),
    }
    print("; ".join(f"{name}: {'yes' if holds else 'NO'}" for name, holds in checks.items()))
    return all(checks.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    servers.end_in_order_on_sigterm()
    flags = ("--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-queued-requests", str(QUEUED_LIMIT))
    with simulated_server(NUM_RANKS, COSTS, *flags) as server:
        results = asyncio.run(measure(url_of(server), args.seconds))
    return 0 if report(*results) else 1


if __name__ == "__main__":
    sys.exit(main())
