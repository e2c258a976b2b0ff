"""What an answer may say before it answers, as a parser tells it apart and a grammar has to let it pass. Pure."""

from __future__ import annotations

from dataclasses import replace

from cores.sampling_params import Reasoning, SamplingParams
from gateway.parsers.reasoning import expected_reasoning
from gateway.server.schema import ChatCompletionRequest


def reasoning_in_front(request: ChatCompletionRequest, parser: str | None, prompt: str | None) -> Reasoning | None:
    """None on a server without a parser, and where the prompt has ended the reasoning."""
    if parser is None:
        return None
    return expected_reasoning(parser, prompt or "", continues_message=bool(request.continue_final_message))


def let_pass(reasoning: Reasoning | None, params: SamplingParams) -> SamplingParams:
    """A grammar begins behind it."""
    if reasoning is None or params.structured_outputs is None:
        return params
    return replace(params, structured_outputs=replace(params.structured_outputs, reasoning=reasoning))
