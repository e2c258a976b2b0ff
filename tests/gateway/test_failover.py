"""What becomes of the requests of a dead rank. The output processor is real; the client only chooses ranks and remembers."""

from __future__ import annotations

import dataclasses
from array import array

import pytest

from balancer.load import RoutingRequest
from cores.messages import EngineCoreOutputs, EngineCoreRequest, RankId, RankLoad
from cores.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputKind, StructuredOutputs
from cores.testing import ManualClock, make_tiny_model_dir
from gateway.core_client.base import SentRequest
from gateway.errors import EngineDeadError, OverloadedError
from gateway.failover import Failover, continued
from gateway.output_collector import RequestOutputCollector
from gateway.output_processor import OutputProcessor
from gateway.request_state import RequestStream
from gateway.tokenizer import Tokenizer

PROMPT = [10, 11, 12]


class Client:
    """Takes every request, or none while `is_full`."""

    def __init__(self) -> None:
        self.sent: list[SentRequest] = []
        self.is_full = False
        self.awaits_restart = True
        self.failure: str | None = None
        self.aborted: list[int] = []
        self.stranded: list[SentRequest] = []

    def take_stranded(self) -> list[SentRequest]:
        stranded, self.stranded = self.stranded, []
        return stranded

    def abort_requests(self, handles: list[int]) -> None:
        self.aborted += handles

    def add_request(self, sent: SentRequest) -> RankId:
        if self.is_full:
            raise OverloadedError("no rank can take a request now")
        self.sent.append(sent)
        return RankId(1, 1)


class Stage:
    """One request that rank 0 holds."""

    def __init__(self, tokenizer: Tokenizer, *, is_enabled: bool = True, **params: object) -> None:
        self.client = Client()
        self.outputs = OutputProcessor(tokenizer)
        self.clock = ManualClock(100.0)
        self.failover = Failover(self.client, self.outputs, self.clock, is_enabled=is_enabled, max_wait_s=60.0)  # type: ignore[arg-type]
        self.collector = RequestOutputCollector(RequestOutputKind.DELTA)
        sampling = SamplingParams(max_tokens=50, seed=7, output_kind=RequestOutputKind.DELTA, **params)  # type: ignore[arg-type]
        stream = RequestStream(
            external_id="r", internal_id="r-1", prompt=None, prompt_token_ids=PROMPT, params=sampling,
            sink=self.collector, arrival_s=0.0,
        )  # fmt: skip
        self.outputs.add_sequence(stream, handle=1, index=0, params=sampling)
        request = EngineCoreRequest(
            handle=1, request_id="r-1", prompt_token_ids=PROMPT, sampling_params=sampling, arrival_time_s=0.0,
            num_original_prompt_tokens=len(PROMPT),
        )  # fmt: skip
        self.sent = SentRequest(request, RoutingRequest(num_prompt_tokens=3, pinned_rank=0))

    def generate(self, *token_ids: int) -> None:
        for token_id in token_ids:
            outputs = EngineCoreOutputs(
                rank_id=RankId(0, 1), step=1, command_seq=1, load=RankLoad(), handles=array("I", [1]),
                token_ids=array("I", [token_id]),
            )  # fmt: skip
            list(self.outputs.process(outputs, 128, now=1.0))

    def text(self) -> str:
        """All that a client has seen and not been asked about before."""
        text, is_over = "", False
        while not is_over and (output := self.collector.get_nowait()) is not None:
            text += "".join(completion.text for completion in output.outputs)
            is_over = output.finished
        return text


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(make_tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny"))


def test_it_goes_on_from_the_last_accepted_token_with_the_same_seed_and_budget(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer)
    stage.generate(40, 41, 42)
    assert stage.failover.on_death([stage.sent]) == {}
    (moved,) = stage.client.sent
    assert moved.request.prompt_token_ids == [*PROMPT, 40, 41, 42]
    assert moved.request.num_original_prompt_tokens == 3
    assert moved.request.sampling_params == stage.sent.request.sampling_params
    assert (moved.routing.num_prompt_tokens, moved.routing.pinned_rank) == (6, None)
    assert stage.failover.num_moved == 1


def test_at_the_death_of_the_last_rank_nothing_is_said_to_go_on(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer)
    stage.generate(40)
    stage.client.failure = "no rank is left"
    assert stage.failover.on_death([stage.sent]) == {1: None}
    assert (stage.failover.num_moved, stage.failover.num_waiting, stage.client.sent) == (0, 0, [])


def test_what_is_accepted_twice_is_sent_once(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer)
    stage.generate(40)
    stage.failover.on_death([stage.sent])
    stage.generate(41)
    stage.failover.on_death([stage.client.sent[0]])
    assert stage.client.sent[1].request.prompt_token_ids == [*PROMPT, 40, 41]


@pytest.mark.parametrize(
    ("before", "after", "stop", "text"),
    [
        ("wait S", "TOP and more", ["STOP"], "wait "),
        ("wait ST", "ART", ["STOP"], "wait START"),
        ("größ"[:-1], "ß", None, "größ"),
    ],
    ids=["a stop string half matched that is one", "and one that is none", "whole characters"],
)
def test_what_was_held_back_when_the_rank_died_is_shown_or_not_as_if_nothing_was(
    tokenizer: Tokenizer, before: str, after: str, stop: list[str] | None, text: str
) -> None:
    stage = Stage(tokenizer, stop=stop)
    stage.generate(*tokenizer.encode(before, add_special_tokens=False))
    stage.failover.on_death([stage.sent])
    stage.generate(*tokenizer.encode(after, add_special_tokens=False))
    assert stage.text().removesuffix(" and more") == text


@pytest.mark.parametrize("character", ["ü", "€", "🙂"])
def test_a_character_of_which_the_dead_rank_had_sent_a_part_is_whole(tokenizer: Tokenizer, character: str) -> None:
    first, *rest = tokenizer.encode(character, add_special_tokens=False)
    stage = Stage(tokenizer)
    stage.generate(first)
    assert stage.text() == ""
    stage.failover.on_death([stage.sent])
    stage.generate(*rest)
    assert stage.text() == character


def test_it_keeps_its_adapter_its_grammar_and_its_penalties(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer, frequency_penalty=0.5, structured_outputs=StructuredOutputs(StructuredOutputKind.REGEX, "[ab]+"))
    request = dataclasses.replace(stage.sent.request, lora_name="french", lora_id="of-the-files")
    stage.generate(40)
    stage.failover.on_death([dataclasses.replace(stage.sent, request=request)])
    moved = stage.client.sent[0].request
    assert moved == dataclasses.replace(request, prompt_token_ids=[*PROMPT, 40])


def test_a_queued_request_is_sent_again_as_it_was(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer, prompt_logprobs=2)
    stage.failover.on_death([stage.sent])
    assert stage.client.sent[0].request == stage.sent.request


def test_prompt_logprobs_that_came_are_not_asked_for_again(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer, prompt_logprobs=2)
    assert continued(stage.sent, [40]).request.sampling_params.prompt_logprobs is None


def test_it_waits_while_no_rank_can_take_it_and_goes_on_when_one_can(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer)
    stage.client.is_full = True
    assert stage.failover.on_death([stage.sent]) == {}
    assert stage.failover.num_waiting == 1
    stage.failover.resume()
    assert stage.failover.num_waiting == 1
    stage.client.is_full = False
    stage.failover.resume()
    assert stage.failover.num_waiting == 0
    assert len(stage.client.sent) == 1


def test_it_does_not_wait_longer_than_a_rank_may_take_to_start(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer)
    stage.client.is_full = True
    stage.failover.on_death([stage.sent])
    stage.clock.sleep(59.0)
    stage.failover.resume()  # in vain: that is no new beginning
    stage.failover.expire()
    assert stage.failover.num_waiting == 1
    stage.clock.sleep(1.0)
    stage.failover.expire()
    assert stage.failover.num_waiting == stage.outputs.num_unfinished == 0
    with pytest.raises(EngineDeadError, match="no rank took the request within 60 s"):
        stage.collector.get_nowait()


def test_a_new_request_waits_only_where_a_rank_will_come(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer)
    stage.client.is_full = True
    stage.failover.send(stage.sent)
    assert stage.failover.num_waiting == 1
    stage.client.awaits_restart = False
    with pytest.raises(OverloadedError):
        stage.failover.send(stage.sent)


def test_a_request_that_is_queued_for_a_rank_that_is_gone_ends_or_waits_like_a_new_one(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer)
    stage.client.is_full = True  # it would take this one on no other rank
    stage.client.stranded = [stage.sent]
    stage.failover.expire()
    assert stage.failover.num_waiting == 1
    stage.failover.drop([1])
    stage.client.awaits_restart = False
    stage.client.stranded = [stage.sent]
    stage.failover.expire()
    assert stage.failover.num_waiting == stage.outputs.num_unfinished == 0
    with pytest.raises(OverloadedError):
        stage.collector.get_nowait()


def test_a_request_that_ends_while_it_waits_is_not_sent(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer)
    stage.client.is_full = True
    stage.failover.on_death([stage.sent])
    stage.failover.drop(stage.outputs.abort("r"))
    assert stage.failover.num_waiting == 0
    stage.client.is_full = False
    stage.failover.resume()
    assert stage.client.sent == []


def test_a_request_that_had_ended_is_neither_moved_nor_failed(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer)
    stage.outputs.abort("r")
    assert stage.failover.on_death([stage.sent]) == {}
    assert stage.client.sent == []


def test_a_request_that_was_there_at_three_deaths_fails_alone(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer)
    assert stage.failover.on_death([stage.sent]) == {}
    assert stage.failover.on_death([stage.client.sent[0]]) == {}
    (reason,) = stage.failover.on_death([stage.client.sent[1]]).values()
    assert reason == "the request was there at 3 deaths of ranks and may be their cause"


def test_without_failover_everything_is_lost(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer, is_enabled=False)
    assert stage.failover.on_death([stage.sent]) == {1: None}
    assert stage.outputs.fail([1], EngineDeadError("rank 0 died")) == []


def test_no_request_is_blamed_for_deaths_that_were_nobodys(tokenizer: Tokenizer) -> None:
    stage = Stage(tokenizer)
    assert stage.failover.on_death([stage.sent], is_blameless=True) == {}
    for i in range(3):
        assert stage.failover.on_death([stage.client.sent[i]], is_blameless=True) == {}
    assert stage.client.sent[-1].num_deaths == 0
