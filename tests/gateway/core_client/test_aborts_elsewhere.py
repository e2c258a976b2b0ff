"""Asking the other front ends: who answers, who is waited for, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from cores.codec import Message
from cores.control_messages import AbortedElsewhere, AbortElsewhere
from gateway.core_client.aborts_elsewhere import AbortsElsewhere
from gateway.errors import OverloadedError


@pytest.mark.parametrize(
    ("answers", "found"), [((True,), True), ((False, True), True), ((False, False), False), ((True, False), True)]
)
async def test_the_first_yes_or_the_last_no_is_the_answer(answers: tuple[bool, ...], found: bool) -> None:
    sent: list[Message] = []
    aborts = AbortsElsewhere(sent.append, index=3, num_others=2)
    asking = asyncio.create_task(aborts.ask("mine", "tenant"))
    await asyncio.sleep(0)
    assert sent == [AbortElsewhere("mine", "tenant", asker=3, call_id=1)]
    for answer in answers:
        aborts.on_message(AbortedElsewhere(3, 1, answer))
    assert await asking is found
    aborts.on_message(AbortedElsewhere(3, 1, True))  # one that comes too late finds nobody


async def test_one_that_says_nothing_is_not_waited_for_for_ever() -> None:
    aborts = AbortsElsewhere(lambda message: None, index=0, num_others=2, timeout_s=0.01)
    asking = asyncio.create_task(aborts.ask("mine", None))
    await asyncio.sleep(0)
    aborts.on_message(AbortedElsewhere(0, 1, False))
    with pytest.raises(OverloadedError, match="1 front end did not answer within"):
        await asking


async def test_a_lone_front_end_asks_nobody() -> None:
    sent: list[Message] = []
    aborts = AbortsElsewhere(sent.append, index=0, num_others=0)
    assert await aborts.ask("mine", None) is False
    aborts.tell("mine")
    assert sent == []


@pytest.mark.parametrize("found", [True, False])
def test_who_is_asked_aborts_and_answers_only_if_that_is_wanted(found: bool) -> None:
    sent: list[Message] = []
    heard: list[tuple[str | None, str | None]] = []
    aborts = AbortsElsewhere(sent.append, index=1, num_others=1)

    def on_abort(request_id: str | None, tenant: str | None) -> bool:
        heard.append((request_id, tenant))
        return found

    aborts.on_abort = on_abort
    aborts.on_message(AbortElsewhere("mine"))
    aborts.on_message(AbortElsewhere("mine", "tenant", asker=0, call_id=9))
    assert heard == [("mine", None), ("mine", "tenant")]
    assert sent == [AbortedElsewhere(0, 9, found)]
