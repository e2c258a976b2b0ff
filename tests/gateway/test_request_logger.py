"""What the log says of a request, and what clients cannot make it say."""

from __future__ import annotations

import logging

import pytest

from cores.sampling_params import SamplingParams
from cores.testing import make_request
from gateway.output_statistics import FinishedRequest
from gateway.request_logger import RequestLogger, describe


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_request_has_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = RequestLogger()
    request = make_request(1, 3)
    log.on_sent(request, "a secret")
    log.on_finished(FinishedRequest("r", request.request_id, "stop", 0, 1.0, 1.5, 2.25, 0.0, 1, 3, 0, 7, 0))
    sent, finished = lines(caplog)
    assert sent.startswith(f"request {request.request_id}: 3 prompt tokens, ")
    assert "secret" not in sent
    assert finished == (
        f"request {request.request_id}: ended by stop on rank 0 with 7 tokens, first token after 0.500 s, last after 1.250 s"
    )


def test_one_that_ended_before_its_first_token_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    RequestLogger().on_finished(FinishedRequest("r", "r-1", "abort", None, 1.0, None, None, 0.0, 1, 3, 0, 0, 0))
    assert lines(caplog) == ["request r-1: ended by abort on rank None with 0 tokens, no token"]


def test_the_prompt_is_for_debugging_cut_and_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    RequestLogger(max_log_len=4).on_sent(make_request(1, 30), "a\nb\x1bcd")
    text = lines(caplog)[1]
    assert "prompt 'a\\nb\\x1b', token ids [" in text
    assert text.count(",") == 4


def test_only_what_was_asked_for_is_shown() -> None:
    assert describe(SamplingParams(max_tokens=5, stop=("x",))) == "stop=('x',) max_tokens=5"
