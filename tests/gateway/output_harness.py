"""An output processor's two sides in tests: what an engine sends, and a reader that holds it to its promise."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from cores.messages import EngineCoreOutputs, Finished, FinishReason, RankId, RankLoad
from cores.sampling_params import RequestOutputKind, SamplingParams
from cores.testing import make_tiny_tokenizer
from gateway.output_processor import OutputProcessor, ProcessedOutputs
from gateway.outputs import CompletionOutput, RequestOutput
from gateway.parallel_sampling import ParentRequest
from gateway.request_state import RequestStream
from gateway.tokenizer import Tokenizer

TOKENIZER = Tokenizer(make_tiny_tokenizer())
DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
EOS = 2
LENGTH = Finished(FinishReason.LENGTH)
PROMPT = TOKENIZER.encode("the prompt", False)


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, False)


def outputs(rows: list[tuple[int, list[int]]], *, rank: int = 0, **extras: Any) -> EngineCoreOutputs:
    """Rows are (handle, new tokens)."""
    counts = [len(ids) for _, ids in rows]
    return EngineCoreOutputs(
        rank_id=RankId(rank, 1),
        step=1,
        command_seq=0,
        load=RankLoad(),
        handles=array("I", [handle for handle, _ in rows]),
        token_ids=array("I", [token_id for _, ids in rows for token_id in ids]),
        counts=None if all(count == 1 for count in counts) else array("I", counts),
        **extras,
    )


@dataclass
class RecordingSink:
    """Keeps what it is given and holds the processor to its promise: nothing after the end."""

    outputs: list[RequestOutput] = field(default_factory=list)
    error: Exception | None = None

    @property
    def has_ended(self) -> bool:
        return self.error is not None or any(output.finished for output in self.outputs)

    def put(self, output: RequestOutput) -> None:
        assert not self.has_ended
        self.outputs.append(output)

    def put_error(self, error: Exception) -> None:
        assert not self.has_ended
        self.error = error

    def completions(self, index: int = 0) -> list[CompletionOutput]:
        return [c for output in self.outputs for c in output.outputs if c.index == index]

    def text(self, index: int = 0) -> str:
        return "".join(completion.text for completion in self.completions(index))

    def token_ids(self, index: int = 0) -> list[int]:
        return [token_id for completion in self.completions(index) for token_id in completion.token_ids]


def add_request(
    processor: OutputProcessor,
    handle: int,
    *,
    name: str | None = None,
    external_id: str = "request",
    lora_name: str | None = None,
    tenant: str | None = None,
    **params: Any,
) -> RecordingSink:
    """Registers a request; its children have handles from `handle` on."""
    sink = RecordingSink()
    settings = SamplingParams(**{"output_kind": DELTA, "seed": 1, "max_tokens": 100} | params)
    internal_id = name or f"request-{handle}"
    parent = ParentRequest(internal_id, settings) if settings.n > 1 else None
    stream = RequestStream(
        external_id=external_id,
        internal_id=internal_id,
        prompt="the prompt",
        prompt_token_ids=PROMPT,
        params=settings,
        sink=sink,
        arrival_s=10.0,
        parent=parent,
        lora_name=lora_name,
        tenant=tenant,
    )
    for index in range(settings.n):
        child_params = parent.child_params(index) if parent else settings
        processor.add_sequence(stream, handle=handle + index, index=index, params=child_params)
    return sink


def feed(processor: OutputProcessor, batch: EngineCoreOutputs, now: float = 11.0) -> ProcessedOutputs:
    (done,) = processor.process(batch, 128, now)
    processor.check_invariants()
    return done


def feed_text(processor: OutputProcessor, handle: int, text: str) -> None:
    for token_id in tokens(text):
        feed(processor, outputs([(handle, [token_id])]))
