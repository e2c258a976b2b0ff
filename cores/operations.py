"""What an operator does to a running engine: pause it, put it to sleep, give it other weights, look into it.

Every method marked as a utility is called by name, on the thread that steps the engine: between two steps, never beside one.
Knows no sockets and no tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cores.messages import RankId
from cores.runner.interface import RunnerOperations
from cores.standstill import MEMORY_TAGS, Standstill
from cores.step_engine import StepEngine
from cores.utilities import NOT_YET, Later, OperationRefusedError, utility

PAUSE_MODES = ("abort", "wait", "keep")
SLEEP_LEVELS = (1, 2)


class Operations:
    """`end_requests` aborts all requests, `has_work` says whether any are left or have an end that was not sent yet,
    `no_sleep` why it cannot sleep, if so."""

    def __init__(
        self,
        rank_id: RankId,
        engine: StepEngine,
        runner: RunnerOperations,
        end_requests: Callable[[], None],
        has_work: Callable[[], bool],
        profile_dir: str | None = None,
        no_sleep: str = "",
    ) -> None:
        self.standstill = Standstill()
        self.weight_version = 0
        self._rank_id = rank_id
        self._engine = engine
        self._runner = runner
        self._end_requests = end_requests
        self._has_work = has_work
        self._profile_dir = profile_dir
        self._no_sleep = no_sleep
        self._is_profiling = False
        self._num_profiles = 0
        self._prepared: str | None = None  # directory of the weights that wait to be committed

    # --- pause --------------------------------------------------------------------------------------------------------

    @utility
    def pause(self, mode: str = "abort", clear_cache: bool = True) -> Later | None:
        """No new requests and no steps until `resume`. What runs is aborted, waited for, or kept as it is.

        With `clear_cache`, cached prefixes are forgotten and what is kept will be computed again.
        """
        return self._halt(mode, functools.partial(self._pause, clear_cache))

    def _pause(self, clear_cache: bool) -> None:
        self.standstill.pause()
        if clear_cache:
            self._forget_kv()

    @utility
    def resume(self) -> None:
        self.standstill.resume()

    @utility
    def is_paused(self) -> bool:
        return self.standstill.is_paused

    def _halt(self, mode: str, then: Callable[[], None]) -> Later | None:
        """Calls `then` once no request is left, or at once with those that are kept."""
        if mode not in PAUSE_MODES:
            raise OperationRefusedError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        if mode == "keep":
            self.standstill.call_off_drains()
            then()
            return None
        if mode == "wait" and self.standstill.is_frozen and self._has_work():
            raise OperationRefusedError("it stands still with requests that cannot end: resume it first, or abort them")
        drain = self.standstill.begin_drain()
        if mode == "abort":
            self._end_requests()
        return Later(functools.partial(self._poll_drain, drain, then))

    def _poll_drain(self, drain: int, then: Callable[[], None]) -> Any:
        self.standstill.check_drain(drain)
        if self._has_work():
            return NOT_YET
        self.standstill.end_drain(drain)
        then()
        return None

    def _forget_kv(self) -> None:
        """What was computed is void: for requests that go on later, too."""
        self._engine.preempt_all()
        self._engine.reset_prefix_cache()

    # --- sleep --------------------------------------------------------------------------------------------------------

    @utility
    def sleep(self, level: int = 1, mode: str = "abort") -> Later | None:
        """Gives memory back until `wake_up`: the KV cache's, and the weights', which level 1 keeps on the host."""
        if level not in SLEEP_LEVELS:
            raise OperationRefusedError(f"level must be one of {', '.join(map(str, SLEEP_LEVELS))}, got {level!r}")
        if self._no_sleep:
            raise OperationRefusedError(self._no_sleep)
        return self._halt(mode, functools.partial(self._sleep, level))

    def _sleep(self, level: int) -> None:
        self._forget_kv()
        self._runner.sleep(level)
        self.standstill.fall_asleep()

    @utility
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Brings memory back by tag; None: all of it. Dropped weights are read from where they came from last."""
        tags_to_wake = self.standstill.asleep_among(tags)
        self._runner.wake_up(tags_to_wake)
        self.standstill.wake_up(tags_to_wake)

    @utility
    def is_sleeping(self) -> bool:
        return self.standstill.is_asleep

    @utility
    def restore(self, settings: Mapping[str, Any]) -> None:
        """Makes an engine that has just started what its group is by now: `GroupSettings`, as plain values. What it is already
        stays as it is, and so does what it has to do."""
        if settings["weight_version"] != self.weight_version:
            self.update_weights(settings["weights_directory"], settings["weight_version"])
        asleep = settings["asleep"]
        if asleep and not self.standstill.is_asleep:
            self._sleep(settings["sleep_level"])
            self.wake_up([tag for tag in MEMORY_TAGS if tag not in asleep])
        if settings["is_paused"]:
            self.standstill.pause()

    # --- weights ------------------------------------------------------------------------------------------------------

    @utility
    def update_weights(self, directory: str, version: int) -> int:
        """Other weights of the same shapes, from a directory. If anything is wrong with them, the old ones go on serving."""
        self.prepare_weights(directory)
        return self.commit_weights(directory, version)

    @utility
    def prepare_weights(self, directory: str) -> None:
        """The first half of `update_weights`, in which everything that can go wrong does: a group commits when all could."""
        if self.standstill.sleeps("weights"):
            raise OperationRefusedError("its weights sleep: wake them up first")
        self._runner.prepare_weights(directory)
        self._prepared = directory

    @utility
    def commit_weights(self, directory: str, version: int) -> int:
        if self._prepared != directory:  # nothing to refuse: the others have committed, and this one cannot
            raise RuntimeError(f"no weights from {directory!r} are prepared")
        self._runner.commit_weights()
        self._prepared = None
        self._forget_kv()
        self.weight_version = version
        return version

    @utility
    def discard_weights(self) -> None:
        self._runner.discard_weights()
        self._prepared = None

    @utility
    def get_weight_version(self) -> int:
        return self.weight_version

    # --- caches -------------------------------------------------------------------------------------------------------

    @utility
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Forgets all cached prefixes, also those that running requests are computing; those then may be computed again."""
        if reset_running_requests:
            self._engine.preempt_all()
        self._engine.reset_prefix_cache()

    @utility
    def reset_mm_cache(self) -> None:
        """Of processed images and sounds. No model here takes any, so it is always empty."""

    @utility
    def reset_encoder_cache(self) -> None:
        """Of their encodings; as `reset_mm_cache`."""

    # --- looking inside -----------------------------------------------------------------------------------------------

    @utility
    def collective_rpc(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls a public method of the model runner by name."""
        function = None if method.startswith("_") else getattr(self._runner, method, None)
        if not callable(function):
            raise OperationRefusedError(f"{type(self._runner).__name__} has no method {method!r}")
        return function(*args, **(kwargs or {}))

    @utility
    def get_stats(self) -> dict[str, Any]:
        return {
            "state": str(self.standstill.state),
            "weight_version": self.weight_version,
            "load": dataclasses.asdict(self._engine.load()),
            "scheduler": dataclasses.asdict(self._engine.stats()),
        }

    @utility
    def start_profile(self) -> None:
        if self._profile_dir is None:
            raise OperationRefusedError("there is no place for a profile: start with --profile-dir")
        if self._is_profiling:
            raise OperationRefusedError("a profile is running already")
        os.makedirs(self._profile_dir, exist_ok=True)
        self._runner.start_profile()
        self._is_profiling = True

    @utility
    def stop_profile(self) -> str:
        """Returns the file that was written."""
        if self._profile_dir is None or not self._is_profiling:
            raise OperationRefusedError("no profile is running")
        self._is_profiling = False
        self._num_profiles += 1
        name = f"rank-{self._rank_id.rank}-{self._rank_id.epoch}-{self._num_profiles}"
        return str(self._runner.stop_profile(Path(self._profile_dir) / name))
