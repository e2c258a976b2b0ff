"""The rare operations of an engine client, all through one door that goes to every rank. Knows no sockets.

An operation succeeds only if every rank does it, and what is asked of all has one answer only if all agree. Which ranks take
requests meanwhile, their own state says. What is to last is remembered in `GroupSettings`, for ranks that start again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cores.messages import RankId
from cores.sampling_params import is_int
from gateway.config import MAX_RANKS
from gateway.errors import EngineGenerateError, GatewayError, InvalidRequestError, OverloadedError
from gateway.group_settings import MEMORY_TAGS, GroupSettings, GroupStore
from gateway.models import absolute_path
from gateway.shared_value import locked_unless_stopped, to_its_end

logger = logging.getLogger(__name__)

UTILITY_TIMEOUT_S = 600.0  # the weights of a large model from a slow disk
DRAIN_TIMEOUT_S = 30.0
MAX_DRAIN_TIMEOUT_S = 86_400.0
PAUSE_MODES = ("abort", "wait", "keep")
SLEEP_LEVELS = (1, 2)


class Operations(ABC):
    group: GroupStore

    @abstractmethod
    async def call_utility_by_rank(
        self, method: str, *args: Any, timeout_s: float | None = UTILITY_TIMEOUT_S
    ) -> dict[int, Any]:
        """Calls an engine core's utility on every rank, and returns the results by rank.

        Succeeds only if every rank does: raises `InvalidRequestError` or `EngineGenerateError` naming the rank that refused or
        failed, `EngineGenerateError` naming those that did not answer in time, `EngineDeadError` if one dies meanwhile.
        """

    @abstractmethod
    async def tell_ranks(
        self,
        method: str,
        *args: Any,
        rank_ids: Sequence[RankId] | None = None,
        timeout_s: float | None = UTILITY_TIMEOUT_S,
        insist: bool = False,
    ) -> int:
        """The same on these ranks, or on all that serve now, for what those that start again find in the group's settings: so
        one that dies meanwhile is no error. Returns how many have done it. With `insist` it stands as soon as one has: those
        that fail or do not answer are declared dead, and their next lives are restored from the settings."""

    @abstractmethod
    async def abort_queued(self) -> None:
        """Ends the requests that no rank has yet, at all front ends of the endpoint: readers get finish reason "abort"."""

    async def call_utility(self, method: str, *args: Any, timeout_s: float | None = UTILITY_TIMEOUT_S) -> list[Any]:
        """`call_utility_by_rank`, in order of the ranks."""
        return list((await self.call_utility_by_rank(method, *args, timeout_s=timeout_s)).values())

    async def call_agreed(self, method: str, *args: Any) -> Any:
        """The one result of all ranks. Raises `EngineGenerateError` naming each rank's, if they differ."""
        results = await self.call_utility_by_rank(method, *args)
        first, *others = results.values()
        if any(other != first for other in others):
            said = ", ".join(f"rank {rank} says {result!r}" for rank, result in results.items())
            raise EngineGenerateError(f"{method}: the ranks disagree: {said}")
        return first

    async def restore_rank(self, rank_id: RankId, timeout_s: float = UTILITY_TIMEOUT_S) -> None:
        """Before it takes requests: makes a rank that has started again what the others are."""
        # A stopped front end must not keep it from serving here. Weights that one still commits, it gets when that one restores
        # it in turn, or dies of: it has prepared none.
        async with locked_unless_stopped(self.group, f"{rank_id} is restored"):
            if self.settings != GroupSettings():
                plain = dataclasses.asdict(self.settings)
                await self.tell_ranks("restore", plain, rank_ids=[rank_id], timeout_s=timeout_s)

    @property
    def settings(self) -> GroupSettings:
        return self.group.read() or GroupSettings()

    async def _change(
        self,
        change: Callable[[GroupSettings], GroupSettings],
        method: str,
        *args: Any,
        timeout_s: float | None = UTILITY_TIMEOUT_S,
    ) -> None:
        async with self.group.locked():
            before = self.settings
            after = change(before)
            self.group.write(after)
        try:
            await self.tell_ranks(method, *args, timeout_s=timeout_s, insist=True)
        except GatewayError:  # refused, or nobody could
            async with self.group.locked():
                if self.settings == after:
                    self.group.write(before)
            raise

    # --- pause and sleep ----------------------------------------------------------------------------------------------

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """No new requests and no steps until `resume_generation`. Those in flight are aborted, waited for, or kept as they are
        to go on then. With `clear_cache` nothing computed before is used after. A caller that leaves does not undo it."""
        _check("mode", mode, PAUSE_MODES)
        # Waiting is bounded by the requests: each has a last token, and a rank that makes none is noticed.
        timeout_s = None if mode == "wait" else UTILITY_TIMEOUT_S
        await to_its_end(self._change(GroupSettings.paused, "pause", mode, clear_cache, timeout_s=timeout_s))
        if mode == "abort":  # now that no rank takes any of them
            await self.abort_queued()

    async def resume_generation(self) -> None:
        await to_its_end(self._change(GroupSettings.resumed, "resume"))

    async def is_paused(self) -> bool:
        return bool(await self.call_agreed("is_paused"))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Gives memory back until `wake_up`: the KV cache's and the weights', which level 1 keeps on the host. `mode` as for
        `pause_generation`."""
        _check("level", level, SLEEP_LEVELS)
        _check("mode", mode, PAUSE_MODES)
        timeout_s = None if mode == "wait" else UTILITY_TIMEOUT_S
        await to_its_end(self._change(lambda settings: settings.slept(level), "sleep", level, mode, timeout_s=timeout_s))
        if mode == "abort":
            await self.abort_queued()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Brings memory back, all of it without tags. Requests are welcome again when nothing sleeps any more."""
        for tag in tags or ():
            _check("tags", tag, MEMORY_TAGS)
        tags = None if tags is None else list(tags)
        await to_its_end(self._change(lambda settings: settings.woken(tags), "wake_up", tags))

    async def is_sleeping(self) -> bool:
        return bool(await self.call_agreed("is_sleeping"))

    # --- weights ------------------------------------------------------------------------------------------------------

    async def update_weights(self, directory: str, version: int | None = None) -> int:
        """Other weights of the same shapes, from a directory that every rank can read. Returns the version that outputs carry
        from then on: one more than before, if none is given.

        All ranks or none: each reads and checks them first, and only if all could, all change. Requests in flight go on with
        the new weights, everything computed with the old ones forgotten. A caller that leaves does not undo it.
        """
        if version is not None and not 0 <= version < 2**63:
            raise InvalidRequestError(f"version must be from 0 to 2^63 - 1, got {version}", "version")
        return await to_its_end(self._update_weights(absolute_path(directory), version))

    async def _update_weights(self, directory: str, version: int | None) -> int:
        # The lock keeps ranks that start again from serving before they know which weights it will be.
        async with self.group.locked():
            before = self.settings
            version = before.weight_version + 1 if version is None else version
            try:
                if await self.tell_ranks("prepare_weights", directory) == 0:
                    raise OverloadedError("no rank is there to read the weights")
                self.group.write(before.with_weights(directory, version))
                await self.tell_ranks("commit_weights", directory, version, insist=True)
            except BaseException:
                self.group.write(before)
                with contextlib.suppress(GatewayError):  # a second set of weights must not stay in every rank's memory
                    await self.tell_ranks("discard_weights")
                raise
        return version

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Weights over a network, from a trainer: no engine here can. Those in a directory: `update_weights`."""
        raise NotImplementedError("init_weight_transfer_engine is not implemented: weights come from a directory")

    async def start_weight_update(self) -> None:
        raise NotImplementedError("start_weight_update is not implemented: weights come from a directory")

    async def finish_weight_update(self) -> None:
        raise NotImplementedError("finish_weight_update is not implemented: weights come from a directory")

    async def get_weight_version(self) -> int:
        return int(await self.call_agreed("get_weight_version"))

    # --- the group: each returns when it is done ----------------------------------------------------------------------

    @abstractmethod
    async def order(self, action: str, *, rank: int = 0, size: int = 0, drain_timeout_s: float = 0.0) -> None:
        """See `EngineCoreClient.order`."""

    async def drain_rank(self, rank: int) -> None:
        """It gets no new requests; those that it has go on. Raises `InvalidRequestError`: 404 for an unknown rank, 409 for one
        whose state does not allow it."""
        await self.order("drain", rank=_checked_rank(rank))

    async def undrain_rank(self, rank: int) -> None:
        """It gets requests again."""
        await self.order("undrain", rank=_checked_rank(rank))

    async def restart_rank(self, rank: int, drain_timeout: float = DRAIN_TIMEOUT_S) -> None:
        """Drains it, ends it, and returns when its next life is ready. What is not finished after `drain_timeout` seconds goes
        on at another rank, or at this one when it is back. Raises `EngineDeadError` when it does not come back."""
        await self.order("restart", rank=_checked_rank(rank), drain_timeout_s=_checked_timeout(drain_timeout))

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: float = DRAIN_TIMEOUT_S) -> None:
        """Another number of ranks while serving. New ranks take the lowest free numbers; those that serve nobody, then drained
        ones, then the highest numbers go. All or nothing when growing: raises `EngineDeadError` when one does not start."""
        if not (is_int(new_data_parallel_size) and 1 <= new_data_parallel_size <= MAX_RANKS):
            raise InvalidRequestError(
                f"new_data_parallel_size must be an integer from 1 to {MAX_RANKS}, got {new_data_parallel_size!r:.80}",
                "new_data_parallel_size",
            )
        await self.order("scale", size=new_data_parallel_size, drain_timeout_s=_checked_timeout(drain_timeout))

    # --- caches -------------------------------------------------------------------------------------------------------

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        await self.call_utility("reset_prefix_cache", reset_running_requests)

    async def reset_mm_cache(self) -> None:
        await self.call_utility("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        await self.call_utility("reset_encoder_cache")

    # --- looking inside -----------------------------------------------------------------------------------------------

    async def collective_rpc(
        self,
        method: str,
        timeout_s: float | None = UTILITY_TIMEOUT_S,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of every rank's model runner by name. Arguments and results must be plain values."""
        return await self.call_utility("collective_rpc", method, list(args), dict(kwargs or {}), timeout_s=timeout_s)

    async def start_profile(self) -> None:
        await self.call_utility("start_profile")

    async def stop_profile(self) -> list[str]:
        """The files that the ranks have written, each on its own node."""
        return await self.call_utility("stop_profile")

    async def do_log_stats(self) -> None:
        for rank, stats in (await self.call_utility_by_rank("get_stats")).items():
            logger.info("rank %d: %s", rank, stats)


def _check(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise InvalidRequestError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}", name)


def _checked_rank(rank: int) -> int:
    if not (is_int(rank) and 0 <= rank < MAX_RANKS):
        raise InvalidRequestError(f"rank must be an integer from 0 to {MAX_RANKS - 1}, got {rank!r:.80}", "rank", status=404)
    return rank


def _checked_timeout(seconds: float) -> float:
    if not (type(seconds) in (int, float) and 0 <= seconds <= MAX_DRAIN_TIMEOUT_S):
        raise InvalidRequestError(
            f"drain_timeout must be between 0 and {MAX_DRAIN_TIMEOUT_S:.0f} seconds, got {seconds!r:.80}", "drain_timeout"
        )
    return seconds
