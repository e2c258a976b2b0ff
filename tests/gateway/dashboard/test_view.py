"""Frames of the board at fixed sizes."""

from __future__ import annotations

import dataclasses
from io import StringIO
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from gateway.dashboard.board import Board
from gateway.dashboard.feed import Reading
from gateway.dashboard.state import SORTS, Page, ViewState
from gateway.dashboard.view import render
from gateway.status import BalancerStatus, Event, FrontEndStatus, RankStatus, StatusSnapshot, Totals
from scripts.board_scenes import board_at, roles

NOW = 100.0
SCENE_S = 72.0
CAUSE = "killed by signal 9\nTraceback (most recent call last)"


def make_status(**fields: Any) -> StatusSnapshot:
    usual: dict[str, Any] = {
        "version": "0.1.0", "mode": "DPLBAsyncMPClient", "model": "smollm2", "uptime_s": 754.0, "state": "degraded",
        "front_ends": (FrontEndStatus(index=0, pid=4242, in_flight=12, event_loop_lag_ms=0.4),),
        "ranks": (
            RankStatus(rank=0, epoch=1, state="ready", running=64, waiting=5, kv_cache_usage=0.42, generation_tokens_per_s=164,
                       step_ms=18.2, signal_age_ms=4, max_num_seqs=256, prefix_cache_hit_rate=0.5),
            RankStatus(rank=1, epoch=2, state="dead", restarts=1, last_death_s_ago=12.0, death_cause=CAUSE,
                       restart_pending=True),
        ),
        "totals": Totals(requests=17, aborted=1, failed=3, prompt_tokens=90_000, generation_tokens=800),
        "balancer": BalancerStatus(policy="least_tokens", dispatch="early", signal_age_ms=4),
        "events": (Event(seq=1, age_s=90, kind="ready", rank=1, text="up"),
                   Event(seq=2, age_s=12, kind="death", rank=1, text="gone")),
    }  # fmt: skip
    return StatusSnapshot(**(usual | fields))


def make_board(*statuses: StatusSnapshot | str) -> Board:
    """Each endpoint has just been looked at; a string is why there is no status."""
    board = Board([f"http://h:{8000 + i}" for i in range(len(statuses))])
    for i, status in enumerate(statuses):
        url = board.endpoints[i].url
        reading = Reading(url, error=status) if isinstance(status, str) else Reading(url, status)
        board.note(i, reading, NOW)
    return board


def draw(board: Board, now: float = NOW, *, color: str | None = None, no_color: bool = False, **view: Any) -> list[str]:
    """The lines of a frame."""
    view = {"width": 80} | view
    console = Console(
        width=view["width"], file=StringIO(), force_terminal=color is not None, color_system=color, legacy_windows=False,
        no_color=no_color,
    )  # type: ignore[call-overload]  # rich's Literal  # fmt: skip
    console.print(render(board, ViewState(**view), now), end="", no_wrap=True, crop=False)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().split("\n")[:-1]


def test_a_frame_of_eighty_columns_shows_the_essentials() -> None:
    assert [line.rstrip() for line in draw(make_board(make_status()))] == [
        " degraded  smollm2 · 1/2 ready · dead: 1 · least_tokens, early       up 12m 34s",
        "   164 tok/s out            ▇      0 tok/s in            ▁     – req/s",
        " 17 requests · 3 failed · 0 rejected · 0 moved · 1 aborted · 90.0k tokens in",
        " front end 0     12 in flight    0 queued  lag   0.4ms",
        "",
        "rank state      waiting  running  kv cache   tok/s minute   step signal hits rst",
        "   1 dead       12s ago: killed by signal 9                           comes back",
        "   0 ready         5 █▌    64 ▊    42% ██▏     164      ▇ 18.2ms    4ms  50%   –",
        "",
        "     12s ago  death   rank 1    gone",
        "  1m 30s ago  ready   rank 1    up",
    ]


PAGES: list[Page] = ["board", "detail", "events", "help"]


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60), (40, 10), (500, 100)])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_page_has_the_size_of_the_console(num_ranks: int, width: int, height: int, ascii_only: bool) -> None:
    board = board_at(num_ranks, SCENE_S, history_s=2)
    for page in PAGES:
        lines = draw(board, SCENE_S, width=width, height=height, page=page, selected=(0, 1), ascii_only=ascii_only)
        assert len(lines) == height, page
        assert max(map(cell_len, lines)) <= width, page
        assert not ascii_only or "".join(lines).isascii(), page


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
def test_ranks_in_trouble_are_on_top_and_say_why(num_ranks: int, width: int, height: int) -> None:
    lines = draw(board_at(num_ranks, SCENE_S, history_s=2), SCENE_S, width=width, height=height)
    who = roles(num_ranks)
    head = next(i for i, line in enumerate(lines) if line.startswith("rank state"))
    rows = [line.split() for line in lines[head + 1 :] if line.split()[1:2] and line.split()[0].isdigit()]
    order = [state for state in ("dead", "stalled", "draining") if state in who]
    assert [row[:2] for row in rows[: len(order)]] == [[str(who[state]), state] for state in order]
    (dead,) = (i for i, line in enumerate(lines) if f" {who['dead']} dead" in line)
    told = " ".join(" ".join(lines[dead : dead + 2]).split())
    assert "27s ago: process 4242 was killed by signal 9 (SIGKILL)" in told
    assert told.count("comes back") == 1
    assert all(f"{state}: {who[state]}" in lines[0] for state in order)


OOM = (
    "its worker process was killed by the kernel's out-of-memory killer while it loaded weights (exit code 137), and no node"
    " has room for it now"
)


def dead_board(num_dead: int, num_ready: int) -> Board:
    dead = [RankStatus(rank=i, epoch=1, state="dead", last_death_s_ago=27, death_cause=OOM) for i in range(num_dead)]
    ready = [RankStatus(rank=num_dead + i, epoch=1, state="ready") for i in range(num_ready)]
    event = Event(seq=1, age_s=27, kind="death", rank=0, text=f"epoch 1 died with 1 request in flight: {OOM}")
    return make_board(make_status(ranks=(*dead, *ready), events=(event,)))


@pytest.mark.parametrize("height", [24, None])
def test_eighty_columns_show_all_of_a_cause_of_death(height: int | None) -> None:
    lines = draw(dead_board(1, 7), height=height)
    top = next(i for i, line in enumerate(lines) if " 0 dead " in line)
    assert [line.rstrip() for line in lines[top : top + 4]] == [
        "   0 dead       27s ago: its worker process was killed by the kernel's",
        "                out-of-memory killer while it loaded weights (exit code 137),",
        "                and no node has room for it now                       stays dead",
        "   1 ready         0        0       0%           0      ▁      –      –   0%   –",
    ]
    event = next(i for i, line in enumerate(lines) if " ago  death " in line)
    told = " ".join(line[31:].strip() for line in lines[event : event + 3])
    assert told.startswith(
        "epoch 1 died with 1 request in flight: its worker process was killed by the kernel's out-of-memory killer"
    )
    assert told.endswith("…")


def test_many_long_causes_leave_room_for_the_ranks_that_serve() -> None:
    lines = draw(dead_board(12, 12), height=24)
    dead = [line for line in lines if " dead " in line[:16]]
    assert 5 < len(dead) < 12
    assert all(line.rstrip().endswith("… stays dead") for line in dead[2:])
    lines = draw(dead_board(12, 12), width=80, height=None)
    assert sum("room for it now" in line for line in lines) == 12


def test_the_page_of_events_scrolls_by_events_to_the_oldest_however_many_lines_each_has() -> None:
    events = tuple(
        Event(seq=i, age_s=100 - i, kind="death", rank=0, text=f"number {i}: {OOM}"[: 30 + 9 * i]) for i in range(20)
    )
    board = make_board(make_status(events=events))
    seen = set()
    for scroll in (*range(20), 10**6):
        lines = draw(board, height=24, page="events", scroll=scroll)
        assert len(lines) == 24
        rule = next(i for i, line in enumerate(lines) if line.startswith("── events"))
        shown = [int(line.split("number ")[1].partition(":")[0]) for line in lines[rule:] if "number " in line]
        hidden = sum(int(word) for word in lines[rule].split() if word.isdigit())
        assert hidden + len(shown) == 20, scroll
        seen |= set(shown)
    assert 0 in shown
    assert seen == set(range(20))


def test_columns_do_not_move_when_numbers_change() -> None:
    """From 0 to as large as they get."""
    small = RankStatus(rank=0, epoch=1, state="ready")
    large = RankStatus(
        rank=0, epoch=10**6, state="ready", waiting=10**9, running=10**9, kv_cache_usage=1.0, prefix_cache_hit_rate=1.0,
        queued_tokens=10**12, prompt_tokens_per_s=1e9, generation_tokens_per_s=1e9, step_ms=1e9, signal_age_ms=1e9,
        ledger_tokens=10**12, restarts=999, requests_total=10**12, requests_moved_away=10**9, last_death_s_ago=1e8,
        death_cause="x" * 1000,
    )  # fmt: skip
    for width in (80, 120, 200):
        rows = [
            next(line for line in draw(make_board(make_status(ranks=(rank,))), width=width) if " ready " in line[:12])
            for rank in (small, large)
        ]
        separators = [{i for i, char in enumerate(line) if char != " "} for line in rows]
        head = next(line for line in draw(make_board(make_status()), width=width) if line.startswith("rank state"))
        # Where a title ends, a number ends, whatever its length.
        for title in ("tok/s", "step", "signal", "hits", "rst"):
            end = head.index(f" {title}") + len(title)
            assert all(end in cells for cells in separators), (width, title)


def test_a_wide_frame_adds_columns() -> None:
    head = next(line for line in draw(make_board(make_status()), width=200) if line.startswith("rank"))
    for title in ("waiting", "running", "kv cache", "in tok/s", "tok/s", "last minute", "step", "signal", "hits", "queued"):
        assert title in head
    for title in ("booked", "requests", "moved", "rst", "last death"):
        assert title in head
    assert "\n".join(draw(make_board(make_status()), width=200)).count("Traceback") == 0


def test_states_are_words_in_colour_and_trouble_stands_out_without_colours_too() -> None:
    text = "\n".join(draw(make_board(make_status()), color="standard"))
    assert "\x1b[32mready" in text
    assert "\x1b[1;7;31mdead" in text
    plain = "\n".join(draw(make_board(make_status()), color="standard", no_color=True))
    assert "\x1b[1;7mdead" in plain
    assert "\x1b[32m" not in plain
    assert "\x1b" not in "\n".join(draw(make_board(make_status())))


def test_no_text_of_a_server_reaches_the_terminal_as_a_command() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J"
    rank = RankStatus(rank=0, epoch=1, state=evil, death_cause=evil, last_death_s_ago=1.0, node=evil, device=evil)
    event = Event(seq=1, age_s=1, kind=evil, rank=0, text=evil)
    status = make_status(state=evil, model=evil, mode=evil, version=evil, ranks=(rank,), events=(event,))
    for page in PAGES:
        for width in (80, 200):
            lines = draw(make_board(status, evil), width=width, height=40, page=page, selected=(0, 0))
            assert "\x1b" not in "".join(lines)
            assert "\x07" not in "".join(lines)


def test_sixty_four_ranks_scroll_with_the_selected_one_in_sight() -> None:
    board = board_at(64, SCENE_S, history_s=2)
    for rank in range(64):
        lines = draw(board, SCENE_S, height=24, selected=(0, rank))
        (marked,) = (line for line in lines if line.startswith("▶"))
        assert marked.split()[1] == str(rank)
        rule = next(line for line in lines if line.startswith("── events"))
        hidden = sum(int(word) for word in rule.split() if word.isdigit())
        shown = sum(
            line.split()[0].lstrip("▶").isdigit() or line.startswith("▶")
            for line in lines[6:]
            if " ago " not in line[:14] and line.strip()
        )
        assert hidden + shown >= 64


def test_ranks_of_several_nodes_are_grouped() -> None:
    lines = draw(board_at(64, SCENE_S, history_s=2), SCENE_S, width=120, height=None)
    headings = [line for line in lines if line.startswith("── ")]
    assert [line.split("  ")[0] for line in headings] == ["── trouble", *(f"── node gpu-{i:02d}" for i in range(8))]
    assert "7/7 ready" in headings[1]
    assert "8/8 ready" in headings[2]


def test_a_cluster_of_two_that_has_lost_one_still_says_on_which_node_its_ranks_are() -> None:
    def on(node: str) -> Any:
        return make_status(ranks=tuple(RankStatus(rank=i, epoch=1, state="ready", node=(node, "a")[i]) for i in range(2)))

    board = make_board(on("b"))
    board.note(0, Reading("http://h:8000", on("a")), NOW + 7)
    headings = [line for line in draw(board, NOW + 8, width=120) if line.startswith("── node")]
    assert [line.split("  ")[0] for line in headings] == ["── node a"]
    assert "node a" in draw(make_board(on("a")), width=160)[0]  # one that looks later has never seen the other


def test_each_order_is_the_one_it_says() -> None:
    board = board_at(8, SCENE_S, history_s=2)
    status = board.statuses[0]
    for sort, name in (("waiting", "waiting"), ("running", "running"), ("tok/s", "generation_tokens_per_s")):
        rows = [
            int(line.split()[0])
            for line in draw(board, SCENE_S, sort=sort)
            if line.split()[:1] and line.split()[0].isdigit() and len(line.split()) > 3 and line[5:6].isalpha()
        ]
        values = [getattr(status.ranks[rank], name) for rank in rows]
        assert values == sorted(values, reverse=True)
        assert f"sort: {sort}" in draw(board, SCENE_S, sort=sort, height=24)[-1]
    assert set(SORTS) >= {"trouble", "rank", "kv cache", "step"}


def test_an_unreachable_endpoint_says_why_beside_those_that_answer() -> None:
    lines = draw(make_board("Connection refused", make_status()), width=100)
    assert lines[0].startswith("0  unreachable  http://h:8000 Connection refused")
    assert lines[0].rstrip().endswith("never seen, trying")
    assert lines[1].startswith("1  degraded ")
    once = draw(make_board("Connection refused"), width=100, height=None, is_once=True)
    assert once[0].rstrip().endswith("never seen"), "nobody tries again"


def test_ranks_of_several_endpoints_have_the_endpoint_in_their_names_only_where_they_need_it() -> None:
    same = draw(make_board(make_status(), make_status()), width=100)
    assert {line.split()[0] for line in same if " ready " in line[:20] and "/" in line[:5]} == {"0/0", "1/0"}
    ranks = [tuple(dataclasses.replace(rank, rank=rank.rank + 2 * i) for rank in make_status().ranks) for i in range(2)]
    other = draw(make_board(*(make_status(ranks=r) for r in ranks)), width=100)
    assert {line.split()[0] for line in other if line[5:10] == "ready"} == {"0", "2"}


@pytest.mark.parametrize("node", ["", "n{}"])
def test_ranks_that_have_an_endpoint_each_are_in_the_order_of_their_numbers_not_of_the_urls(node: str) -> None:
    def endpoint(rank: int) -> StatusSnapshot:
        return make_status(ranks=(RankStatus(rank=rank, epoch=1, state="ready", node=node.format(rank // 2)),), events=())

    lines = draw(make_board(*map(endpoint, (2, 0, 3, 1))), width=100)
    assert [line.split()[0] for line in lines if line[5:10] == "ready"] == ["0", "1", "2", "3"]
    headings = [line.split()[2] for line in lines if line.startswith("── node")]
    assert headings == (["n0", "n1"] if node else [])


def test_of_many_endpoints_those_in_trouble_are_shown() -> None:
    fine = make_status(state="ready", ranks=(RankStatus(rank=0, epoch=1, state="ready"),), events=())
    lines = draw(make_board(*[fine] * 20, "no answer within 5 s"), height=24)
    assert lines[0].startswith("20  unreachable")
    assert "more endpoints, all ready" in lines[3]


def test_the_last_view_is_kept_with_its_age_while_the_endpoint_is_away() -> None:
    board = make_board(make_status())
    board.note(0, Reading("http://h:8000", error="Connection refused"), NOW + 7)
    lines = draw(board, NOW + 12)
    assert "unreachable" in lines[0]
    assert lines[0].rstrip().endswith("seen 12s ago, trying")
    assert any(line.startswith("   0 ready") for line in lines)
    board.note(0, Reading("http://h:8000", make_status()), NOW + 20)
    assert "connection lost, back since 5s" in draw(board, NOW + 25, width=100)[0]
    assert "connection lost" not in draw(board, NOW + 100, width=100)[0]


def test_an_endpoint_that_does_not_answer_is_told_before_it_is_given_up() -> None:
    board = make_board(make_status())
    board.endpoints[0].asked_s = NOW
    assert "no answer for 3s" in draw(board, NOW + 3)[0]


def test_a_pause_shows_how_old_the_picture_is() -> None:
    lines = draw(make_board(make_status()), NOW + 30, height=24, paused_s=NOW + 1)
    assert "PAUSED, as of 30s ago" in lines[0]
    assert "p go on" in lines[-1]


def test_a_starting_endpoint_shows_how_far_its_ranks_are() -> None:
    ranks = (
        RankStatus(rank=0, epoch=1, state="starting", pid=77, start_progress=0.6),
        RankStatus(rank=1, epoch=0, state="starting", start_progress=0.0),
    )
    lines = draw(make_board(make_status(state="starting", ranks=ranks, events=(), balancer=None)))
    assert "   0 starting    60% ████████████         of its weights, pid 77" in [line.rstrip() for line in lines]
    assert any(line.startswith("   1 starting   loading") for line in lines)
    assert "starting: 0,1" in lines[0]


def test_a_rank_that_starts_again_is_loading_whether_it_has_died_or_was_told_to() -> None:
    by_order = RankStatus(rank=0, epoch=2, state="restarting")
    died = RankStatus(rank=1, epoch=2, state="restarting", last_death_s_ago=3725, death_cause="killed by signal 9")
    lines = draw(make_board(make_status(ranks=(by_order, died))))
    assert any(line.rstrip() == "   0 restarting loading" for line in lines)
    assert any(line.rstrip() == "   1 restarting loading; died 1h 2m ago: killed by signal 9" for line in lines)


def test_a_starting_endpoint_without_ranks_has_no_empty_table() -> None:
    text = "\n".join(draw(make_board(make_status(state="starting", ranks=(), events=(), balancer=None))))
    assert "rank state" not in text
    assert text.startswith(" starting ")


def test_totals_of_several_endpoints_add_up_and_events_are_the_newest_of_all() -> None:
    old, new = (make_status(events=(Event(seq=1, age_s=age, kind="move", rank=None, text=f"{age}"),)) for age in (50, 5))
    lines = [line.strip() for line in draw(make_board(old, new), width=120)]
    assert any(line.startswith("34 requests · 6 failed · 0 rejected · 0 moved · 2 aborted") for line in lines)
    assert [line.split() for line in lines[-2:]] == [["5s", "ago", "move", "5"], ["50s", "ago", "move", "50"]]


def test_what_failed_in_the_last_minute_is_told() -> None:
    board = make_board(make_status())
    board.note(0, Reading("http://h:8000", make_status(totals=Totals(requests=37, failed=5))), NOW + 10)
    lines = draw(board, NOW + 10)
    assert "5 failed (+2)" in lines[2]
    assert "2.0 req/s" in lines[1]


def test_one_look_at_a_busy_server_does_not_say_that_no_requests_come() -> None:
    board = make_board(make_status())
    assert "– req/s" in draw(board)[1]
    assert "- req/s" in draw(board, ascii_only=True)[1]
    board.note(0, Reading("http://h:8000", make_status()), NOW + 10)
    assert " 0 req/s" in draw(board, NOW + 10)[1]


def test_the_detail_of_a_rank_has_its_whole_cause_its_events_and_what_a_newer_server_says_of_it() -> None:
    body = b'{"ranks": [{"rank": 1, "novel_number": 7}]}'
    board = Board(["http://h:8000"])
    board.note(0, Reading("http://h:8000", make_status(), body), NOW)
    text = "\n".join(draw(board, width=100, height=40, page="detail", selected=(0, 1)))
    assert "died 12s ago: killed by signal 9 Traceback" in text
    assert "novel_number" in text
    assert "gone" in text


def test_a_selected_rank_that_is_gone_falls_back_to_the_board() -> None:
    assert any(
        line.startswith("rank state") for line in draw(make_board(make_status()), height=24, page="detail", selected=(0, 9))
    )


def test_what_an_older_server_leaves_out_is_a_question_mark_and_no_gap() -> None:
    ranks = (RankStatus(rank=0, epoch=1, state="ready"), RankStatus(rank=1, epoch=0, state=""))
    lines = draw(make_board(make_status(state="degraded", model="", version="", ranks=ranks, balancer=None)), width=120)
    assert lines[0].startswith(" degraded  ? · 1/2 ready · ?: 1 · ")
    assert "gateway ?" in lines[0]
    assert any(line.startswith("   1 ?  ") for line in lines)
