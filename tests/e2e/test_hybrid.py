"""Hybrid load balancing: an endpoint per node, each balancing over its own ranks of one group."""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

from tests.e2e.conftest import ANSWER_TIMEOUT_S

Serve = Callable[..., Any]
Poll = Callable[..., Any]
NUM_REQUESTS = 40


def complete(url: str, **headers: str) -> requests.Response:
    body = {"model": "tiny", "prompt": "one two three", "temperature": 0, "ignore_eos": True, "max_tokens": 20}
    return requests.post(f"{url}/v1/completions", json=body, headers=headers, timeout=ANSWER_TIMEOUT_S)


def test_two_nodes_of_one_group_each_balance_over_their_own_ranks(
    serve: Serve, simulated: list[str], port_range: Callable[[int], int], poll: Poll, tmp_path: Path
) -> None:
    key_file = tmp_path / "group.key"
    key_file.write_text("0123456789abcdef" * 2)
    key_file.chmod(0o600)
    group = [
        *simulated, "-dp", "4", "--data-parallel-hybrid-lb", "--data-parallel-size-local", "2",
        "--data-parallel-rpc-port", str(port_range(1)), "--data-parallel-key-file", str(key_file),
    ]  # fmt: skip
    nodes = [serve(*group), serve(*group, "--data-parallel-start-rank", "2")]
    assert all("mode=DPLBAsyncMPClient  ranks=2" in node.ready_lines[0] for node in nodes)

    def knows_the_group() -> bool:
        rows = [{row["rank"]: row["url"] for row in node.status()["group"]} for node in nodes]
        urls = [nodes[0].url] * 2 + [nodes[1].url] * 2
        return all(row == dict(enumerate(urls)) for row in rows)

    poll(knows_the_group, "each endpoint knows all ranks of the group and where they are")
    with concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS) as pool:
        with nodes[1].frozen():  # a rank that is slower today would get less
            asked = [pool.submit(complete, nodes[1].url) for _ in range(NUM_REQUESTS)]
            poll(lambda: nodes[1].num_in_flight() == NUM_REQUESTS, "all are in flight")
        answers = [answer.result() for answer in asked]
    ranks = [answer.headers["X-Gateway-Rank"] for answer in answers]
    # Each gets its share.
    assert set(ranks) == {"2", "3"}
    assert min(map(ranks.count, set(ranks))) >= NUM_REQUESTS // 3
    assert complete(nodes[1].url, **{"X-data-parallel-rank": "3"}).headers["X-Gateway-Rank"] == "3"
    elsewhere = complete(nodes[1].url, **{"X-data-parallel-rank": "0"})
    assert elsewhere.status_code == 400
    assert "rank 0 does not exist; the ranks here are 2 to 3" in elsewhere.json()["error"]["message"]
    poll(lambda: all(node.is_idle() for node in nodes), "all is idle")
    command = [sys.executable, "-m", "gateway", "status", "--json", "--url", nodes[0].url, "--url", nodes[1].url]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, check=False)
    assert shown.returncode == 0, shown.stderr
    documents = json.loads(shown.stdout)
    assert sorted(rank["rank"] for document in documents for rank in document["ranks"]) == [0, 1, 2, 3]


def test_a_node_of_several_external_endpoints_starts_at_its_own_rank(
    serve: Serve, simulated: list[str], port_range: Callable[[int], int]
) -> None:
    server = serve(
        *simulated, "-dp", "5", "--data-parallel-multi-port-external-lb", "--data-parallel-start-rank", "3",
        "--data-parallel-size-local", "2", "--port", "0", "--data-parallel-rpc-port", str(port_range(1)), ready_lines=2,
    )  # fmt: skip
    assert sorted(server.status(url)["ranks"][0]["rank"] for url in server.urls) == [3, 4]
