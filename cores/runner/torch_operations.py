"""What all torch runners can do between steps: sleep, take other weights, write a profile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from cores.runner.weights import Weights


class TorchOperations(ABC):
    """The operations of `ModelRunner`."""

    _profiler: torch.profiler.profile | None = None

    @property
    @abstractmethod
    def _weights(self) -> Weights:
        """Of the loaded model."""

    @abstractmethod
    def _release_cache(self) -> None:
        """Gives up the KV cache's memory, if there is one and it is awake."""

    @abstractmethod
    def _restore_cache(self) -> None: ...

    def sleep(self, level: int) -> None:
        self._release_cache()
        if level == 1:
            self._weights.offload()
        else:
            self._weights.drop()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # back to the device, for whoever is to have it

    def wake_up(self, tags: Collection[str]) -> None:
        if "weights" in tags:
            self._weights.restore()
        if "kv_cache" in tags:
            self._restore_cache()

    def prepare_weights(self, directory: str) -> None:
        self._weights.prepare(directory)

    def commit_weights(self) -> None:
        self._weights.commit()

    def discard_weights(self) -> None:
        self._weights.discard()

    def start_profile(self) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def stop_profile(self, stem: Path) -> Path:
        assert self._profiler is not None, "no profile was started"
        self._profiler.stop()
        path = stem.with_suffix(".pt.trace.json.gz")  # the name by which TensorBoard and Perfetto know it
        self._profiler.export_chrome_trace(str(path))
        self._profiler = None
        return path
