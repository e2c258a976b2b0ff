"""The nodes of a Ray cluster: which there are, which of them gets a rank, whether one still answers. Knows no actors.

Ray itself takes 15 s to notice that a node is gone, and calls it alive until then. Its raylet's port is the better witness: the
node's kernel answers there, also for processes that are stopped or busy, and nobody does for a node that is off or cut off.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PROCESS_TIMEOUT_S = 30.0  # what a rank's process has at least: Ray starts one in 2 s, on a machine that has some time
PROBE_INTERVAL_S = 0.5
# How long a node that was lost gets no rank, from its last silence on. Ray ends a node that has left five questions unanswered,
# one every 3 s, the last of them for 10 s: it may be about to when the link is mended.
RECOVERY_S = 30.0
PROBE_TIMEOUT_S = 0.5  # a lost SYN is sent again after 1 s: two probes in a row go unanswered before two seconds are over


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living node, as Ray says."""

    node_id: str
    name: str
    address: str
    port: int  # of its raylet
    num_cpus: float  # that Ray may give away; 0: the node is not meant to compute
    num_gpus: float
    num_free_gpus: float

    @classmethod
    def of(cls, row: Mapping[str, Any], free: Mapping[str, float]) -> Node:
        """From `ray.nodes()` and what is free there."""
        address, name = row["NodeManagerAddress"], row.get("NodeName", "")
        there = row["Resources"]
        return cls(
            node_id=row["NodeID"],
            # Without `--node-name` Ray calls it by its address; the host's name says more.
            name=row["NodeManagerHostname"] if name in ("", address) else name,
            address=address,
            port=row["NodeManagerPort"],
            num_cpus=there.get("CPU", 0.0),
            num_gpus=there.get("GPU", 0.0),
            num_free_gpus=free.get("GPU", 0.0),
        )


def choose_node(nodes: Iterable[Node], ranks_on: Mapping[str, int], *, num_gpus: int) -> Node | None:
    """The node for one more rank: of those that have room the one with the fewest ranks of ours, then with the most room.

    `ranks_on` counts them by node id. None when there is no room. A GPU takes one rank; on CPUs there is always room, if Ray
    may give away any.
    """

    def room(node: Node) -> float:
        if not num_gpus:
            return node.num_cpus
        # Ray knows what other jobs hold, but of what we have asked for a moment ago it may not have heard.
        return min(node.num_free_gpus, node.num_gpus - ranks_on.get(node.node_id, 0))

    fitting = [node for node in nodes if room(node) >= max(1, num_gpus)]
    return min(fitting, key=lambda node: (ranks_on.get(node.node_id, 0), -room(node), node.name), default=None)


def num_sharing(num_ranks: int, nodes: Iterable[Node], *, num_gpus: int) -> int:
    """How many of so many ranks share a node when all that can take some do."""
    num_nodes = sum((node.num_gpus if num_gpus else node.num_cpus) >= 1 for node in nodes)
    return math.ceil(num_ranks / max(1, num_nodes))


def time_for_process_s(timeout_s: float, waited_s: float) -> float:
    """For a rank's process to begin, when finding it a place has taken so much of the time for both."""
    return max(timeout_s - waited_s, min(timeout_s, PROCESS_TIMEOUT_S))


def placement_table(nodes: Sequence[Node], faults: Mapping[str, str], ranks_on: Mapping[str, int], *, num_gpus: int) -> str:
    """What was asked for, and what the cluster has: for people. `faults`: why a node gets no rank now, by its id."""
    asked = f"{num_gpus} GPU" if num_gpus else "a node with CPUs"
    rows = [("node", "address", "CPUs", "GPUs free", "ranks here", "")]
    rows += [
        (
            node.name,
            node.address,
            f"{node.num_cpus:g}",
            f"{node.num_free_gpus:g} of {node.num_gpus:g}",
            str(ranks_on.get(node.node_id, 0)),
            faults.get(node.node_id, ""),
        )
        for node in nodes
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"asked: {asked}; there:", *(f"  {line}" for line in lines)])


@dataclass(frozen=True, slots=True)
class Place:
    node: Node
    num_sharing: int  # ranks of ours, when all are there


class Places:
    """Which node each living rank is on, or has been promised."""

    def __init__(self) -> None:
        self._node_of: dict[object, str] = {}

    def take(self, holder: object, node: Node) -> None:
        self._node_of[holder] = node.node_id

    def give_back(self, holder: object) -> None:
        self._node_of.pop(holder, None)

    @property
    def ranks_on(self) -> Mapping[str, int]:
        return Counter(self._node_of.values())


class LostNodes:
    """When nodes were last silent whose ranks were given up for that. Pure: `now` comes in."""

    def __init__(self) -> None:
        self._silent_at_s: dict[str, float] = {}

    def note_lost(self, node_id: str, now: float) -> None:
        self._silent_at_s[node_id] = now

    def fault(self, node_id: str, answers: bool, now: float) -> str:
        """Why it is to get no rank; empty when it may. To be called with every look at it."""
        if not answers:
            if node_id in self._silent_at_s:
                self._silent_at_s[node_id] = now
            return "does not answer"
        silent_at_s = self._silent_at_s.get(node_id)
        if silent_at_s is None or now - silent_at_s >= RECOVERY_S:
            self._silent_at_s.pop(node_id, None)
            return ""
        return f"was lost; gets ranks again in {RECOVERY_S - (now - silent_at_s):.0f} s"


async def answers(node: Node) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(node.address, node.port), PROBE_TIMEOUT_S)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


class NodeWatch:
    """Asks a node again and again whether it is there, from the start to `close`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._answered_s = time.monotonic()
        self._asking = asyncio.create_task(self._ask(), name=f"watch of node {node.name}")

    async def _ask(self) -> None:
        while True:
            if await answers(self._node):
                self._answered_s = time.monotonic()
            await asyncio.sleep(PROBE_INTERVAL_S)

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._answered_s

    def close(self) -> None:
        self._asking.cancel()
