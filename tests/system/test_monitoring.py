"""A real Prometheus scrapes a real gateway: every query of the board and every alert, through a bad quarter of an hour."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests

from scripts.benchmarks.proxies import free_ports
from tests.e2e.conftest import wait_for
from tests.test_monitoring import ALERTS, QUERIES, ROOT, documented

pytestmark = pytest.mark.system

CONFIGS = ROOT / "configs/prometheus"
DEADLINE_S = 180.0  # for what takes a second or two on a quiet machine
PROMPT_TOKENS = 480  # 30 blocks of 16: four sequences hold 124 of 128, and more from the 33rd token on
SLOW_STEP_MS = 2000
STAYS_QUIET = {"GatewayLedgerDrift"}  # would take a bug; `alerts_test.yml` has it


class Prometheus:
    """With the shipped rules, and a scrape every two seconds."""

    def __init__(self, program: str, directory: Path, url: str) -> None:
        target = url.removeprefix("http://")
        config = (CONFIGS / "prometheus.yml").read_text()
        for shipped, ours in (("interval: 5s", "interval: 2s"), ("127.0.0.1:8000", target)):
            assert shipped in config
            config = config.replace(shipped, ours)
        (directory / "prometheus.yml").write_text(config)
        (directory / "alerts.yml").write_bytes((CONFIGS / "alerts.yml").read_bytes())
        port = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        arguments = ["--config.file", directory / "prometheus.yml", "--storage.tsdb.path", directory / "data"]
        with (directory / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [program, *map(str, arguments), f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
            )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Samples, or none while it starts. An expression that it does not take is an error."""
        try:
            answer = requests.get(f"{self._url}/api/v1/query", params={"query": expression}, timeout=DEADLINE_S)
        except requests.ConnectionError:
            return []
        assert answer.ok or answer.status_code == 503, answer.text
        return answer.json()["data"]["result"] if answer.ok else []

    def values(self, expression: str) -> list[float]:
        return [float(sample["value"][1]) for sample in self.query(expression)]

    def was_true(self, alert: str) -> bool:
        """Its expression, at any second since the start."""
        return bool(self.query(f"count_over_time(({ALERTS[alert]})[20m:1s])"))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()


@pytest.fixture
def watch(program: Callable[[str], str], tmp_path: Path) -> Iterator[Callable[[str], Prometheus]]:
    with contextlib.ExitStack() as stack:

        def start(url: str) -> Prometheus:
            prometheus = Prometheus(program("prometheus"), tmp_path, url)
            stack.callback(prometheus.stop)
            return prometheus

        yield start


async def until(condition: Callable[[], Any], what: str) -> Any:
    return await asyncio.to_thread(wait_for, condition, what, DEADLINE_S)


async def ask(url: str, number: int, num_prompt_tokens: int, max_tokens: int) -> int:
    """Each with a prompt of its own, from its first token on. The status; 0 if the connection was lost."""
    body = {
        "model": "tiny", "prompt": [number, *[9] * (num_prompt_tokens - 1)], "ignore_eos": True, "max_tokens": max_tokens,
    }  # fmt: skip
    try:
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
            await response.read()
            return response.status
    except aiohttp.ClientError:
        return 0


def test_rules_and_configuration_pass_promtool(program: Callable[[str], str]) -> None:
    promtool = program("promtool")
    for words in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run([promtool, *words], cwd=CONFIGS, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


async def test_board_and_alerts_through_a_bad_quarter_of_an_hour(
    program: Callable[[str], str], watch: Callable[[str], Prometheus], serve: Any, slow_simulated: list[str]
) -> None:
    size = ["--max-model-len", "2048", "--num-kv-blocks", "128", "--block-size", "16", "--max-num-seqs", "4"]
    faults = ["--engine-restarts", "3", "--stall-timeout", "20", "--max-num-queued-requests", "40"]
    server = serve(
        *slow_simulated, "-dp", "2", "--api-server-count", "2", *size, *faults,
        env={"GATEWAY_KEEP_ALIVE_ON_ENGINE_DEATH": "1"},
    )  # fmt: skip
    prometheus = watch(server.url)
    await until(lambda: prometheus.values("sum(gateway:rank_up)") == [2.0], "a scrape of two ranks")

    await check_a_calm_server(server, prometheus, program("promtool"))
    await silence_an_idle_rank(server, prometheus)
    await asyncio.to_thread(kill_front_end, server, 0)

    await asyncio.to_thread(server.set_step_ms, SLOW_STEP_MS)
    asking = [asyncio.create_task(ask(server.url, 20 + i, PROMPT_TOKENS, 1000)) for i in range(80)]
    while not prometheus.was_true("GatewayAdmissionRefusing"):  # none of those that wait gets on
        refused = [asyncio.create_task(ask(server.url, 20, PROMPT_TOKENS, 1000)) for _ in range(8)]
        done, late = await asyncio.wait(refused, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result() for task in done} == {503}
        asking += late
    for alert in ("GatewayQueueGrowing", "GatewayKVCacheNearlyFull"):
        await until(lambda alert=alert: prometheus.was_true(alert), alert)
    await stop_a_front_end(server, prometheus)
    await stop_a_rank(server, prometheus)
    await until(lambda: prometheus.was_true("GatewayMovesSpike"), "its requests go on at the other one")
    await asyncio.to_thread(kill_until_dead, server)
    await asyncio.wait_for(asyncio.gather(*asking), DEADLINE_S)

    for alert in ALERTS.keys() - STAYS_QUIET - {"GatewayDown"}:
        await until(lambda alert=alert: prometheus.was_true(alert), alert)
    firing = 'ALERTS{alertname="GatewayRankRestartLoop", alertstate="firing", engine="0"}'
    await until(lambda: prometheus.query(firing), "Prometheus' own word for it")
    check_no_counter_went_back(prometheus)
    assert not any(map(prometheus.was_true, STAYS_QUIET))
    await asyncio.to_thread(server.stop)
    await until(lambda: prometheus.query(ALERTS["GatewayDown"]), "the server is gone")


async def check_a_calm_server(server: Any, prometheus: Prometheus, promtool: str) -> None:
    """Every query of the board has an answer that is a number; `/metrics` is as documented."""
    statuses = await asyncio.gather(*(ask(server.url, 20 + i, 8, 5) for i in range(20)))
    assert statuses == [200] * 20
    for query in QUERIES:
        concrete = query.replace("$__rate_interval", "10m").replace("$job", ".*").replace("$instance", ".*")
        await until(lambda query=concrete: any(map(math.isfinite, prometheus.values(query))), query)
    await until(lambda: prometheus.values("sum(gateway:request_success_total)") == [20.0], "all are counted")
    await until(lambda: prometheus.values("gateway:rank_ledger_difference_requests") == [0.0, 0.0], "the books agree")
    for alert in ("GatewayNoReadyRank", "GatewayRankDead", "GatewayRankStalled", "GatewayErrors", "GatewayAdmissionRefusing"):
        assert prometheus.query(ALERTS[alert]) == [], alert

    text = server.get("/metrics").text
    assert set(_families(text)) == documented().keys() - {"lora_requests_info"}
    # Of the colon in vLLM's names it would say that there should be none.
    await asyncio.to_thread(check_metrics, promtool, text.replace("gateway:", "gateway_"))


def check_metrics(promtool: str, text: str) -> None:
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _families(text: str) -> list[str]:
    return [line.split()[2].removeprefix("gateway:") for line in text.splitlines() if line.startswith("# TYPE gateway:")]


def check_no_counter_went_back(prometheus: Prometheus) -> None:
    names = prometheus.query('count by (__name__) ({__name__=~"gateway:.*_(total|count|sum|bucket)"})')
    assert len(names) > 30
    for name in (sample["metric"]["__name__"] for sample in names):
        assert max(prometheus.values(f"resets({name}[20m])")) == 0, f"{name} went back"


def kill_front_end(server: Any, index: int) -> None:
    pid = front_end_pid(server, index)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: front_end_pid(server, index) not in (None, pid), "the next life of the front end", DEADLINE_S)


def front_end_pid(server: Any, index: int) -> Any:
    with contextlib.suppress(requests.ConnectionError):
        return next((f["pid"] for f in server.status()["front_ends"] if f["index"] == index), None)
    return None


async def stop_a_front_end(server: Any, prometheus: Prometheus) -> None:
    """It is silent, then late. Again, where no scrape fell into the five seconds for which it shows how late it was."""
    silent = 'gateway:front_end_last_seen_seconds{front_end="0"} > 5'
    for _ in range(20):
        pid = front_end_pid(server, 0)
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: prometheus.query(silent), "a silent front end")
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: not prometheus.query(silent), "its word after that")
        if prometheus.was_true("GatewayLoopLag"):
            return
    raise AssertionError("it was never late")


async def stop_a_rank(server: Any, prometheus: Prometheus) -> None:
    """It has work, and is killed for it."""
    os.kill(server.rank(1)["pid"], signal.SIGSTOP)
    await until(lambda: prometheus.was_true("GatewayRankStalled"), "a stalled rank")


async def silence_an_idle_rank(server: Any, prometheus: Prometheus) -> None:
    """Its reports grow old; nothing else comes of it."""
    pid = server.rank(1)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        await until(lambda: prometheus.was_true("GatewaySignalStale"), "old reports")
    finally:
        os.kill(pid, signal.SIGCONT)
    await until(lambda: server.rank(1)["state"] == "ready", "its next sign of life")


def kill_until_dead(server: Any) -> None:
    """Each rank in each of its lives, until the launcher gives it up."""
    for rank in (0, 1):
        killed: set[int] = set()

        def next_pid(rank: int = rank, killed: set[int] = killed) -> Any:
            row = server.rank(rank)
            if row["state"] == "dead" and not row["restart_pending"]:
                return "none"
            return row["pid"] if row["state"] == "ready" and row["pid"] not in killed else None

        while (pid := wait_for(next_pid, f"a life of rank {rank}", DEADLINE_S)) != "none":
            killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
