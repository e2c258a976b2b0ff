"""Traces of other shapes than those that the defaults come from, made here: what the default costs beside the best of the rest.

Nothing is to be tuned to one of them. They are to show where a rule that was right for two traces goes wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from balancer.simulation.trace import TraceRequest
from gateway.config import DEFAULT_POLICY
from scripts.experiments.common import Column, Summary, case, parse_options, print_table, run_cases, scenario_of

LOADS = (0.70, 0.85)
NUM_REQUESTS = 2500
OTHERS = ("least_tokens", "least_requests", "power_of_two", "round_robin", "sglang", "vllm")
FIGURES = (("ttft_ms", "p50"), ("ttft_ms", "p90"), ("ttft_ms", "p99"), ("queue_delay_ms", "p99"))

Shape = Callable[[random.Random, int], Iterator[TraceRequest]]


def about(rng: random.Random, median: int, sigma: float) -> int:
    """A length: heavy-tailed, as lengths are, and at most 100,000."""
    return min(100_000, max(1, round(median * rng.lognormvariate(0.0, sigma))))


def prompt_of(rng: random.Random, ids: Sequence[int]) -> int:
    """Tokens of a prompt that these entries of `hash_ids` name; the last one is full in part."""
    return 512 * len(ids) - rng.randrange(512)


def steady(rng: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(1.0)
        yield now


def bursty(rng: random.Random) -> Iterator[float]:
    """Gaps with four times the deviation of a steady stream's."""
    now = 0.0
    while True:
        now += rng.gammavariate(1 / 16, 16.0)
        yield now


def completions(rng: random.Random, number: int) -> Iterator[TraceRequest]:
    for now, _ in zip(bursty(rng), range(number), strict=False):
        yield TraceRequest(now, about(rng, 1500, 0.9), about(rng, 15, 0.8))


def waves(rng: random.Random, number: int) -> Iterator[TraceRequest]:
    """A hundred at one moment, then nothing for as long as a hundred take."""
    for index in range(number):
        yield TraceRequest(100.0 * (index // 100) + 1e-3 * (index % 100), about(rng, 800, 1.2), about(rng, 200, 0.8))


def one_prompt(rng: random.Random, number: int) -> Iterator[TraceRequest]:
    for now, _ in zip(steady(rng), range(number), strict=False):
        yield TraceRequest(now, 4300, about(rng, 150, 0.7), tuple(range(9)))


def reasoning(rng: random.Random, number: int) -> Iterator[TraceRequest]:
    for now, _ in zip(steady(rng), range(number), strict=False):
        yield TraceRequest(now, about(rng, 300, 1.0), about(rng, 3000, 0.7))


def stories(rng: random.Random, number: int) -> Iterator[TraceRequest]:
    for now, _ in zip(steady(rng), range(number), strict=False):
        yield TraceRequest(now, rng.randint(5, 40), rng.randint(6000, 12_000))


def tenants(rng: random.Random, number: int) -> Iterator[TraceRequest]:
    """Three hundred system prompts, of which some are hot and most are cold, and one question each."""
    weights = [1 / (1 + tenant) for tenant in range(300)]
    own = count(10_000)
    for now, _ in zip(steady(rng), range(number), strict=False):
        (tenant,) = rng.choices(range(300), weights)
        ids = (*range(10 * tenant, 10 * tenant + 5), next(own))
        yield TraceRequest(now, prompt_of(rng, ids), about(rng, 150, 0.8), ids)


def agents(rng: random.Random, number: int) -> Iterator[TraceRequest]:
    """Tools of five kinds; each run sends its growing history again and again, and gets short answers."""
    own, runs = count(10_000), [[0]] * 40
    for now, _ in zip(steady(rng), range(number), strict=False):
        index = rng.randrange(len(runs))
        history = runs[index]
        if len(history) > 60 or len(history) == 1 or rng.random() < 0.05:
            kind = rng.randrange(5)
            history = list(range(100 * kind, 100 * kind + 8))
        history = [*history, *(next(own) for _ in range(rng.randint(1, 4)))]
        runs[index] = history
        yield TraceRequest(now, prompt_of(rng, history), about(rng, 80, 0.7), tuple(history))


def documents(rng: random.Random, number: int) -> Iterator[TraceRequest]:
    """Long ones, about each of which a few questions come close together."""
    own, opened = count(10_000), [list(range(3))] * 8
    for now, _ in zip(steady(rng), range(number), strict=False):
        index = rng.randrange(len(opened))
        if rng.random() < 0.3:
            opened[index] = [next(own) for _ in range(rng.randint(16, 120))]
        ids = (*opened[index], next(own))
        yield TraceRequest(now, prompt_of(rng, ids), about(rng, 200, 0.6), ids)


def giants(rng: random.Random, number: int) -> Iterator[TraceRequest]:
    """One prompt in fifty is as long as all between it and the next one, five times over."""
    for now, _ in zip(steady(rng), range(number), strict=False):
        is_giant = rng.random() < 0.02
        yield TraceRequest(now, rng.randint(60_000, 100_000) if is_giant else about(rng, 200, 0.7), about(rng, 100, 0.7))


SHAPES: dict[str, Shape] = {
    "completions: bursts, short answers": completions,
    "waves of a hundred at once": waves,
    "all the same prompt": one_prompt,
    "reasoning: answers of 3,000 tokens": reasoning,
    "stories: tiny prompts, huge answers": stories,
    "tenants: hot and cold system prompts": tenants,
    "agents: growing histories": agents,
    "documents: a few questions to each": documents,
    "giants: one prompt in fifty": giants,
}


def beside_the_best(shape: str, load: float, summaries: Sequence[Summary]) -> Summary:
    """The default's figures, and each over the least that any other rule had."""
    ours, *others = summaries
    best = {}
    for key, share in FIGURES:
        least = min(others, key=lambda summary: summary[key][share])
        best[f"{key} {share}"] = (ours[key][share], least[key][share], least["policy"])
    return {"policy": shape, "load": load, **best}


def beside(key: str, share: str) -> Callable[[Summary], str]:
    def cell(summary: Summary) -> str:
        ours, least, policy = summary[f"{key} {share}"]
        return f"{ours / 1e3:.3f} / {least / 1e3:.3f} ({policy})"

    return cell


def main() -> None:
    options = parse_options(__doc__, default_seeds=1, needs_traces=False)
    rows = []
    for name, shape in SHAPES.items():
        scenario = scenario_of(list(shape(random.Random(1), options.max_requests or NUM_REQUESTS)))
        for load in LOADS:
            trace = scenario.at(load)
            policies = (DEFAULT_POLICY, *(options.policies or OTHERS))
            summaries = run_cases([case(policy, policy, scenario.config, trace) for policy in policies], options)
            print(f"{name}, load {load:.2f}: {load * scenario.capacity_per_s:.2f} requests/s\n")
            print_table(summaries)
            rows.append(beside_the_best(name, load, summaries))
    columns: list[Column] = [("load", lambda summary: f"{summary['load']:.2f}")]
    columns += [(f"{key.removesuffix('_ms').replace('_', ' ')} {share}, s", beside(key, share)) for key, share in FIGURES]
    print_table(rows, columns, head=f"{DEFAULT_POLICY} / best other")


if __name__ == "__main__":
    main()
