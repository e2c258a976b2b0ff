"""What an operation asks of the ranks, and what it makes of their answers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cores.messages import RankId
from gateway.errors import EngineGenerateError, InvalidRequestError, OverloadedError
from gateway.group_settings import GroupSettings, GroupStore
from gateway.operations import Operations
from gateway.shared_value import OwnValue, SharedValue


class Ranks(Operations):
    """Ranks that answer what the test says: one value for all, or a dict by rank."""

    def __init__(self, **results: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.timeouts: list[float | None] = []
        self.insisted: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}  # what is answered once it is set
        self.results = results
        self.group: GroupStore = OwnValue()

    async def call_utility_by_rank(self, method: str, *args: Any, timeout_s: float | None = 1.0) -> dict[int, Any]:
        self.calls.append((method, *args))
        self.timeouts.append(timeout_s)
        if method in self.gates:
            await self.gates[method].wait()
        result = self.results.get(method)
        if isinstance(result, Exception):
            raise result
        return result if isinstance(result, dict) else {0: result, 3: result}

    async def tell_ranks(
        self,
        method: str,
        *args: Any,
        rank_ids: Sequence[RankId] | None = None,
        timeout_s: float | None = 1.0,
        insist: bool = False,
    ) -> int:
        if insist:
            self.insisted.append(method)
        return len(await self.call_utility_by_rank(method, *args, timeout_s=timeout_s))

    async def abort_queued(self) -> None:
        self.calls.append(("abort_queued",))

    async def order(self, action: str, **options: Any) -> None:
        self.calls.append((action, options))


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_what_no_rank_has_yet_is_aborted_once_no_rank_takes_it_if_at_all(mode: str) -> None:
    ranks = Ranks()
    await ranks.pause_generation(mode)
    await ranks.sleep(1, mode)
    ended = [("abort_queued",)] if mode == "abort" else []
    assert ranks.calls == [("pause", mode, True), *ended, ("sleep", 1, mode), *ended]


async def test_one_answer_needs_all_ranks_to_agree() -> None:
    assert await Ranks(is_sleeping=True).is_sleeping() is True
    assert await Ranks(is_paused=False).is_paused() is False
    assert await Ranks(get_weight_version=4).get_weight_version() == 4
    with pytest.raises(EngineGenerateError, match="is_paused: the ranks disagree: rank 0 says True, rank 3 says False"):
        await Ranks(is_paused={0: True, 3: False}).is_paused()


async def test_arguments_are_checked_before_any_rank_hears_of_them() -> None:
    ranks = Ranks()
    for operation, word in (
        (ranks.pause_generation("later"), "mode must be one of abort, wait, keep, got 'later'"),
        (ranks.sleep(3), "level must be one of 1, 2, got 3"),
        (ranks.sleep(1, "now"), "mode"),
        (ranks.wake_up(["weights", "all"]), "tags must be one of weights, kv_cache, got 'all'"),
        (ranks.update_weights("/w", -1), "version"),
    ):
        with pytest.raises(InvalidRequestError, match=word):
            await operation
    assert ranks.calls == []


async def test_only_waiting_for_requests_has_no_bound_of_its_own() -> None:
    ranks = Ranks()
    for mode in ("abort", "keep", "wait"):
        await ranks.pause_generation(mode)
        await ranks.sleep(1, mode)
    assert [timeout is None for timeout in ranks.timeouts] == [False] * 4 + [True] * 2


async def test_new_weights_are_prepared_by_all_before_any_commits() -> None:
    ranks = Ranks()
    directory = os.path.join(os.getcwd(), "weights")
    assert [await ranks.update_weights("weights", 4), await ranks.update_weights("weights")] == [4, 5]
    assert ranks.calls == [
        ("prepare_weights", directory),
        ("commit_weights", directory, 4),
        ("prepare_weights", directory),
        ("commit_weights", directory, 5),
    ]
    assert ranks.settings == GroupSettings(weights_directory=directory, weight_version=5)


async def test_weights_that_one_rank_cannot_take_are_taken_by_none() -> None:
    ranks = Ranks(prepare_weights=InvalidRequestError("rank 3 (epoch 1): no such directory"))
    with pytest.raises(InvalidRequestError, match="no such directory"):
        await ranks.update_weights("/w", 7)
    assert [call[0] for call in ranks.calls] == ["prepare_weights", "discard_weights"]
    assert ranks.settings == GroupSettings()


async def test_weights_that_nobody_can_read_now_are_not_taken() -> None:
    ranks = Ranks(prepare_weights={})
    with pytest.raises(OverloadedError, match="no rank is there"):
        await ranks.update_weights("/w", 7)
    assert ranks.settings == GroupSettings()


async def test_what_operators_did_is_remembered_for_ranks_that_start_again() -> None:
    ranks = Ranks()
    await ranks.restore_rank(RankId(3, 2))
    assert ranks.calls == []  # nothing to tell
    await ranks.pause_generation("keep")
    await ranks.sleep(2)
    await ranks.wake_up(["weights"])
    expected = GroupSettings(is_paused=True, sleep_level=2, asleep=("kv_cache",))
    assert ranks.settings == expected
    await ranks.restore_rank(RankId(3, 2))
    assert ranks.calls[-1] == ("restore", dataclasses.asdict(expected))


@pytest.mark.parametrize(
    "error",
    [InvalidRequestError("rank 0 (epoch 1): it sleeps"), EngineGenerateError("resume was not done within 600 s on rank 0")],
)
async def test_what_no_rank_does_is_not_remembered(error: Exception) -> None:
    ranks = Ranks(resume=error)
    await ranks.pause_generation()
    with pytest.raises(type(error), match="rank 0"):
        await ranks.resume_generation()
    assert ranks.settings.is_paused


async def test_ranks_that_do_not_do_what_lasts_are_left_to_their_next_lives() -> None:
    ranks = Ranks()
    await ranks.pause_generation()
    await ranks.update_weights("/w")
    await ranks.restore_rank(RankId(3, 2))
    await ranks.resume_generation()
    assert ranks.insisted == ["pause", "commit_weights", "resume"]


async def test_a_caller_that_leaves_while_weights_are_committed_lets_nobody_in_before_they_are() -> None:
    ranks = Ranks()
    committed = ranks.gates["commit_weights"] = asyncio.Event()
    updating = asyncio.create_task(ranks.update_weights("/w", 7))
    while len(ranks.calls) < 2:
        await asyncio.sleep(0)
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating
    restoring = asyncio.create_task(ranks.restore_rank(RankId(3, 2)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert [call[0] for call in ranks.calls] == ["prepare_weights", "commit_weights"]
    committed.set()
    await restoring
    assert ranks.calls[2] == ("restore", dataclasses.asdict(GroupSettings(weights_directory="/w", weight_version=7)))


async def test_weights_that_no_rank_commits_are_not_what_a_rank_starts_with() -> None:
    ranks = Ranks(commit_weights=EngineGenerateError("commit_weights was not done within 600 s"))
    with pytest.raises(EngineGenerateError, match="commit_weights was not done"):
        await ranks.update_weights("/w", 7)
    assert [call[0] for call in ranks.calls] == ["prepare_weights", "commit_weights", "discard_weights"]
    assert ranks.settings == GroupSettings()


async def test_a_rank_is_restored_before_or_after_a_change_and_not_within() -> None:
    ranks = Ranks()
    async with ranks.group.locked():
        restoring = asyncio.ensure_future(ranks.restore_rank(RankId(3, 2)))
        await asyncio.sleep(0)
        ranks.group.write(GroupSettings(is_paused=True))
        assert ranks.calls == []
    await restoring
    assert [call[0] for call in ranks.calls] == ["restore"]


async def test_a_rank_that_restarts_serves_although_a_stopped_front_end_holds_the_lock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks, path = Ranks(), tmp_path / "group.json"
    ranks.group = SharedValue(path, GroupSettings, lock_timeout_s=0.02)
    stopped: GroupStore = SharedValue(path, GroupSettings)
    async with stopped.locked():
        stopped.write(GroupSettings(is_paused=True))
        await ranks.restore_rank(RankId(3, 2))
        assert [call[0] for call in ranks.calls] == ["restore"]
        with pytest.raises(EngineGenerateError, match=r"another change of group has not ended after 0\.02 s"):
            await ranks.resume_generation()
    assert "a front end may be stopped" in caplog.text
    await ranks.resume_generation()
    assert not ranks.settings.is_paused


async def test_the_error_told_is_the_first_one() -> None:
    ranks = Ranks(prepare_weights=InvalidRequestError("too wide"), discard_weights=EngineGenerateError("gone"))
    with pytest.raises(InvalidRequestError, match="too wide"):
        await ranks.update_weights("/w", 7)


async def test_collective_rpc_carries_its_arguments_and_its_time() -> None:
    ranks = Ranks(collective_rpc={0: "a", 3: "b"})
    assert await ranks.collective_rpc("f", 2.5, (1,), {"k": 2}) == ["a", "b"]
    assert (ranks.calls, ranks.timeouts) == ([("collective_rpc", "f", [1], {"k": 2})], [2.5])


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("init_weight_transfer_engine", ({},)), ("start_weight_update", ()), ("finish_weight_update", ()),
    ],
)  # fmt: skip
async def test_what_no_engine_can_do_is_refused_by_name(name: str, args: tuple[Any, ...]) -> None:
    with pytest.raises(NotImplementedError, match=name):
        await getattr(Ranks(), name)(*args)


@pytest.mark.parametrize(
    ("name", "args", "param", "status"),
    [
        ("drain_rank", (-1,), "rank", 404),
        ("undrain_rank", ("0",), "rank", 404),
        ("restart_rank", (1024,), "rank", 404),
        ("restart_rank", (0, -1.0), "drain_timeout", 400),
        ("scale_elastic_ep", (0,), "new_data_parallel_size", 400),
        ("scale_elastic_ep", (True,), "new_data_parallel_size", 400),
        ("scale_elastic_ep", (2, float("nan")), "drain_timeout", 400),
    ],
)
async def test_orders_that_make_no_sense_are_refused_by_name(name: str, args: tuple[Any, ...], param: str, status: int) -> None:
    ranks = Ranks()
    with pytest.raises(InvalidRequestError) as caught:
        await getattr(ranks, name)(*args)
    assert (caught.value.param, caught.value.status, ranks.calls) == (param, status, [])


async def test_log_stats_is_a_line_per_rank(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await Ranks(get_stats={0: {"state": "ready"}, 3: {"state": "paused"}}).do_log_stats()
    assert caplog.messages == ["rank 0: {'state': 'ready'}", "rank 3: {'state': 'paused'}"]
