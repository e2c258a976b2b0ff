"""A prompt that comes in pieces: each piece goes on the same sequence, on the same rank, where its prefix is cached.

Every piece is answered in turn, by a request of its own whose prompt is all that was said before, by both sides. So what one
piece brought is never merged with the next. An output with a finish reason ends its piece; the session ends with one more
output, which is `finished` and holds nothing new.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from cores.sampling_params import RequestOutputKind
from gateway.engine_client import Prompt, TokenizedPrompt
from gateway.errors import InvalidRequestError
from gateway.input_processor import check_kind
from gateway.outputs import CompletionOutput, RequestOutput

Piece = Prompt
Answer = Callable[[list[int], int | None], AsyncGenerator[RequestOutput, None]]
Encode = Callable[[str, bool], Awaitable[list[int]]]


class InputSession:
    """`answer(prompt_token_ids, rank)` runs one request; `encode(text, is_first)` tokenizes a piece."""

    def __init__(self, answer: Answer, encode: Encode, output_kind: RequestOutputKind) -> None:
        self._answer = answer
        self._encode = encode
        self._output_kind = output_kind
        self._token_ids: list[int] = []  # of both sides
        self._rank: int | None = None  # of the first piece

    async def run(self, pieces: AsyncIterator[Piece]) -> AsyncGenerator[RequestOutput, None]:
        """Raises `InvalidRequestError` when there is no piece, and what `answer` raises."""
        last: RequestOutput | None = None
        async for piece in pieces:
            self._token_ids += await self._to_token_ids(piece)
            async with aclosing(self._answer(list(self._token_ids), self._rank)) as outputs:
                async for output in outputs:
                    self._take(output)
                    last = output
                    yield replace(output, finished=False)
            if last is not None and last.outputs[0].finish_reason == "abort":
                break
        if last is None:
            raise InvalidRequestError("the prompt has no pieces", "prompt")
        end = last.outputs[0]
        yield replace(last, outputs=[CompletionOutput(0, "", [], None, end.finish_reason, end.stop_reason)], finished=True)

    async def _to_token_ids(self, piece: Piece) -> Sequence[int]:
        if isinstance(piece, TokenizedPrompt):
            return piece.token_ids
        check_kind(piece)
        return await self._encode(piece, not self._token_ids) if isinstance(piece, str) else piece

    def _take(self, output: RequestOutput) -> None:
        if self._rank is None:
            self._rank = output.rank
        (completion,) = output.outputs
        if self._output_kind is RequestOutputKind.DELTA or completion.finished:
            self._token_ids += completion.token_ids
