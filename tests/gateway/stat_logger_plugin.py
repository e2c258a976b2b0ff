"""A stat logger as somebody else's package would have it: used by name."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.config import GatewayConfig
from gateway.output_statistics import FinishedRequest, TokenTimes
from gateway.stat_loggers import StatLogger

FILE_VARIABLE = "STAT_LOGGER_PLUGIN_FILE"


class Counter(StatLogger):
    """Counts tokens and requests; writes a line per request into the file that the environment names."""

    wants_traces = True

    def __init__(self, config: GatewayConfig, index: int) -> None:
        self.index = index
        self.num_token_batches = 0

    def on_tokens(self, times: TokenTimes) -> None:
        self.num_token_batches += 1

    def on_finished(self, request: FinishedRequest) -> None:
        path = os.environ.get(FILE_VARIABLE)
        if path is not None:
            trace = (request.trace_headers or {}).get("traceparent")
            line = f"{self.index} {request.external_id} {request.finish_reason} {request.num_generation_tokens} {trace}\n"
            with Path(path).open("a") as file:
                file.write(line)


class Faulty(StatLogger):
    def on_tokens(self, times: TokenTimes) -> None:
        raise RuntimeError("this plug-in has a bug")
