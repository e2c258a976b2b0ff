"""Which node gets a rank, and what people are told when none can. No Ray is needed to decide that."""

from __future__ import annotations

import socket
from typing import Any

from cores.launch.ray_nodes import (
    PROCESS_TIMEOUT_S,
    RECOVERY_S,
    LostNodes,
    Node,
    NodeWatch,
    Places,
    answers,
    choose_node,
    num_sharing,
    placement_table,
    time_for_process_s,
)


def make_node(name: str, *, cpus: float = 0.0, gpus: float = 0.0, free: float | None = None, port: int = 1) -> Node:
    free_gpus = gpus if free is None else free
    return Node(
        node_id=f"id-{name}", name=name, address="127.0.0.1", port=port, num_cpus=cpus, num_gpus=gpus, num_free_gpus=free_gpus
    )


HEAD, SMALL, BIG = make_node("head"), make_node("small", cpus=2), make_node("big", cpus=8)


def place_all(nodes: list[Node], num_ranks: int, num_gpus: int = 0) -> list[str | None]:
    places, names = Places(), []
    for rank in range(num_ranks):
        node = choose_node(nodes, places.ranks_on, num_gpus=num_gpus)
        names.append(node and node.name)
        if node is not None:
            places.take(rank, node)
    return names


def test_ranks_are_spread_and_none_goes_to_a_head_that_gives_no_cpu_away() -> None:
    assert place_all([HEAD, SMALL, BIG], 5) == ["big", "small", "big", "small", "big"]


def test_a_gpu_takes_one_rank_and_what_other_jobs_hold_is_not_there() -> None:
    nodes = [make_node("a", cpus=8, gpus=2), make_node("b", gpus=1), make_node("held", gpus=4, free=0), BIG]
    assert place_all(nodes, 4, num_gpus=1) == ["a", "b", "a", None]


def test_a_place_that_is_given_back_can_be_taken_again() -> None:
    places, node = Places(), make_node("a", gpus=1)
    places.take("rank 0", node)
    assert choose_node([node], places.ranks_on, num_gpus=1) is None
    places.give_back("rank 0")
    places.give_back("rank 0")
    assert choose_node([node], places.ranks_on, num_gpus=1) is node


def test_nowhere_is_no_place() -> None:
    assert choose_node([], {}, num_gpus=0) is None
    assert choose_node([HEAD], {}, num_gpus=0) is None


def test_ranks_share_the_cores_of_the_nodes_that_can_take_some() -> None:
    assert num_sharing(5, [HEAD, SMALL, BIG], num_gpus=0) == 3
    assert num_sharing(4, [HEAD, make_node("g", gpus=8)], num_gpus=1) == 4


def test_the_table_says_what_was_asked_and_what_there_is() -> None:
    nodes = [HEAD, make_node("worker", cpus=8, gpus=4, free=0), make_node("gone", cpus=8, gpus=4)]
    faults = {"id-head": "", "id-worker": "", "id-gone": "does not answer"}
    assert placement_table(nodes, faults, {"id-worker": 3}, num_gpus=1).splitlines() == [
        "asked: 1 GPU; there:",
        "  node    address    CPUs  GPUs free  ranks here",
        "  head    127.0.0.1  0     0 of 0     0",
        "  worker  127.0.0.1  8     0 of 4     3",
        "  gone    127.0.0.1  8     4 of 4     0           does not answer",
    ]


def test_a_node_is_called_by_its_given_name_else_by_its_host() -> None:
    row: dict[str, Any] = {
        "NodeID": "x", "NodeManagerAddress": "10.0.0.2", "NodeManagerHostname": "host", "NodeManagerPort": 5,
        "NodeName": "10.0.0.2", "Resources": {"CPU": 2.0, "GPU": 4.0},
    }  # fmt: skip
    assert Node.of(row, {"GPU": 1.0}) == Node(
        node_id="x", name="host", address="10.0.0.2", port=5, num_cpus=2.0, num_gpus=4.0, num_free_gpus=1.0
    )
    assert Node.of(row | {"NodeName": "rack-7"}, {}).name == "rack-7"


async def test_a_node_answers_while_its_port_is_open_whatever_its_process_does() -> None:
    # A backlog and nobody who accepts: as of a process that is stopped.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        node = make_node("there", port=listener.getsockname()[1])
        assert await answers(node)
        watch = NodeWatch(node)
        assert watch.silent_s < 60.0
        watch.close()
    assert not await answers(node)


def test_a_lost_node_whose_link_is_mended_gets_no_rank_until_ray_has_decided_about_it() -> None:
    lost = LostNodes()
    lost.note_lost("a", now=100.0)
    assert lost.fault("a", answers=False, now=105.0) == "does not answer"
    assert lost.fault("a", answers=True, now=110.0) == "was lost; gets ranks again in 25 s"
    assert lost.fault("a", answers=False, now=111.0) == "does not answer"  # it flaps
    assert lost.fault("a", answers=True, now=111.0 + RECOVERY_S - 1.0) == "was lost; gets ranks again in 1 s"
    assert lost.fault("a", answers=True, now=111.0 + RECOVERY_S) == ""
    assert lost.fault("a", answers=True, now=111.0 + RECOVERY_S) == ""


def test_a_node_that_leaves_one_question_unanswered_was_not_lost() -> None:
    lost = LostNodes()
    assert lost.fault("a", answers=False, now=1.0) == "does not answer"
    assert lost.fault("a", answers=True, now=2.0) == ""


def test_finding_a_place_and_starting_there_share_one_time_and_a_process_always_has_some() -> None:
    assert time_for_process_s(600.0, waited_s=0.0) == 600.0
    assert time_for_process_s(600.0, waited_s=500.0) == 100.0
    assert time_for_process_s(600.0, waited_s=600.0) == PROCESS_TIMEOUT_S
    assert time_for_process_s(3.0, waited_s=3.0) == 3.0
