"""`--enable-log-requests`: two lines per request, when it is sent and when it has ended. Its prompt at debug level only."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from cores.messages import EngineCoreRequest
from cores.sampling_params import SamplingParams
from cores.words import counted
from gateway.output_statistics import FinishedRequest
from gateway.stat_loggers import StatLogger

logger = logging.getLogger(__name__)

_DEFAULTS = SamplingParams()


class RequestLogger(StatLogger):
    """`max_log_len` bounds the characters or token ids of a prompt that are shown; None: all."""

    def __init__(self, max_log_len: int | None = None) -> None:
        self._max_log_len = max_log_len

    def on_sent(self, request: EngineCoreRequest, prompt_text: str | None) -> None:
        extras = {
            "lora": request.lora_name,
            "priority": request.priority or None,
            "session": request.session_id,
            "pooling": request.pooling_params,
        }
        shown = "".join(f", {name} {value}" for name, value in extras.items() if value is not None)
        logger.info(
            "request %s: %d prompt tokens%s, %s", request.request_id, len(request.prompt_token_ids), shown,
            describe(request.sampling_params), extra={"request_id": request.request_id},
        )  # fmt: skip
        if logger.isEnabledFor(logging.DEBUG):
            text, token_ids = self._cut(prompt_text), self._cut(request.prompt_token_ids)
            logger.debug(
                "request %s: prompt %s, token ids %s",
                request.request_id,
                text,
                token_ids,
                extra={"request_id": request.request_id},
            )

    def on_finished(self, request: FinishedRequest) -> None:
        first_s = request.first_token_s
        ttft = "no token" if first_s is None else f"first token after {first_s - request.arrival_s:.3f} s"
        last_s = "" if request.last_token_s is None else f", last after {request.last_token_s - request.arrival_s:.3f} s"
        tokens = counted(request.num_generation_tokens, "token")
        logger.info(
            "request %s: ended by %s on rank %s with %s, %s%s", request.internal_id, request.finish_reason, request.rank,
            tokens, ttft, last_s, extra={"request_id": request.internal_id, "rank": request.rank},
        )  # fmt: skip

    def _cut(self, prompt: str | Sequence[int] | None) -> str:
        """On one line: what a client has sent must not write lines of our log."""
        return repr(prompt if prompt is None else prompt[: self._max_log_len])


def describe(params: SamplingParams) -> str:
    """Only what was asked for."""
    fields = ((f.name, getattr(params, f.name)) for f in dataclasses.fields(params))
    return " ".join(f"{name}={value!r}" for name, value in fields if value != getattr(_DEFAULTS, name))
