"""A prompt and its parameters as the caller gave them, to what engines can be sent. Says no in words that name the field."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cores.pooling_params import PoolingParams
from cores.sampling_params import (
    InvalidParameterError,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputs,
    is_int,
    is_text,
)
from gateway.engine_client import ModelConfig, Prompt, TokenizedPrompt
from gateway.errors import InvalidRequestError
from gateway.renderer import Renderer

# What a request for a vector looks like to all that knows only sequences: it ends with its prompt, in one output.
FOR_POOLING = SamplingParams(temperature=0.0, seed=0, max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)
MAX_TIMEOUT_S = 1_000_000  # eleven days
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # OpenAI's code: clients shorten their history on it


@dataclass(frozen=True, slots=True)
class ProcessedInput:
    prompt_token_ids: list[int]
    prompt_text: str | None  # None: it came as token ids
    sampling_params: SamplingParams  # `seed` and `max_tokens` are set


GrammarCheck = Callable[[StructuredOutputs], Awaitable[None]]


async def _leave_it_to_the_engine(_wanted: StructuredOutputs) -> None:
    """An engine compiles each grammar in any case, and fails the request if it cannot."""


class InputProcessor:
    """For one model. `rng` draws the seeds of requests that have none; `check_grammar` raises for a grammar that is no good."""

    def __init__(
        self,
        model_config: ModelConfig,
        renderer: Renderer,
        rng: random.Random,
        check_grammar: GrammarCheck = _leave_it_to_the_engine,
    ) -> None:
        self._model = model_config
        self._renderer = renderer
        self._rng = rng
        self._check_grammar = check_grammar

    async def process(
        self, prompt: Prompt, params: SamplingParams, tokenization_kwargs: Mapping[str, Any] | None = None
    ) -> ProcessedInput:
        """Raises `InvalidRequestError`. Leaves `prompt` and `params` as they are."""
        self._check_params(params)  # first: it costs nothing, and tokenizing may
        token_ids, text = await self._tokenize(prompt, 1, add_special_tokens(tokenization_kwargs))
        params = self._complete(params, len(token_ids))
        if params.structured_outputs is not None:
            await self._check_grammar(params.structured_outputs)
        return ProcessedInput(token_ids, text, params)

    async def process_pooling(self, prompt: Prompt, params: PoolingParams) -> ProcessedInput:
        """The same for a prompt that becomes a vector."""
        self._check_dimensions(params.dimensions)
        token_ids, text = await self._tokenize(prompt, 0)
        return ProcessedInput(token_ids, text, FOR_POOLING)

    # --- the prompt ---------------------------------------------------------------------------------------------------

    async def _tokenize(
        self, prompt: Prompt, num_to_come: int, add_special_tokens: bool = True
    ) -> tuple[list[int], str | None]:
        """Ids, and the text if it came. So many tokens must fit behind them."""
        if isinstance(prompt, TokenizedPrompt):
            token_ids, _ = await self._tokenize(prompt.token_ids, num_to_come)
            return token_ids, prompt.text
        check_kind(prompt)
        if isinstance(prompt, str):
            self.check_text(prompt)
            token_ids = await self._renderer.encode_async(prompt, add_special_tokens)
            self._check_length(len(token_ids), num_to_come)
            return token_ids, prompt
        self._check_length(len(prompt), num_to_come)
        token_ids = list(prompt)
        self._check_token_ids("prompt", token_ids)
        return token_ids, None

    def check_text(self, text: str) -> None:
        """Refuses what cannot fit before time is spent on tokenizing it. Also for those who tokenize themselves."""
        max_chars = self._renderer.tokenizer.max_chars(self._model.max_model_len)
        if max_chars is not None and len(text) > max_chars:
            raise InvalidRequestError(
                f"the prompt has {len(text)} characters, of which at most {max_chars} can fit into the model's context length"
                f" of {self._model.context_length}",
                "prompt",
                code=CONTEXT_LENGTH_EXCEEDED,
            )

    def _check_length(self, num_tokens: int, num_to_come: int) -> None:
        if num_tokens == 0:
            raise InvalidRequestError("the prompt must not be empty", "prompt")
        if num_tokens + num_to_come > self._model.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_tokens} tokens, but the model's context length is {self._model.context_length}"
                + ", at least one of which is for the output" * num_to_come,
                "prompt",
                code=CONTEXT_LENGTH_EXCEEDED,
            )

    def _check_token_ids(self, param: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < self._model.vocab_size:
                raise InvalidRequestError(
                    f"{param}: token ids must be integers from 0 to {self._model.vocab_size - 1}, got {token_id!r}", param
                )

    # --- the parameters -----------------------------------------------------------------------------------------------

    def _check_params(self, params: SamplingParams) -> None:
        try:
            params.verify()
        except InvalidParameterError as error:
            raise InvalidRequestError(str(error), error.param) from error
        missing = params.first_missing(self._model.features)
        if missing is not None:
            raise InvalidRequestError(f"{missing} is not supported by this server's engines", missing)
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self._check_token_ids("logit_bias", params.logit_bias or ())
        if params.allowed_token_ids is not None:
            if not params.allowed_token_ids:
                raise InvalidRequestError("allowed_token_ids must not be empty", "allowed_token_ids")
            if len(params.allowed_token_ids) > self._model.vocab_size:
                raise InvalidRequestError(
                    f"allowed_token_ids takes at most the {self._model.vocab_size} ids of the vocabulary,"
                    f" got {len(params.allowed_token_ids)}",
                    "allowed_token_ids",
                )
            self._check_token_ids("allowed_token_ids", params.allowed_token_ids)

    def _check_dimensions(self, dimensions: int | None) -> None:
        model = self._model
        if dimensions is None or dimensions == model.embedding_size or dimensions in model.embedding_dimensions:
            return
        allowed = model.embedding_dimensions or (model.embedding_size,)
        shown = f"from 1 to {allowed[-1]}" if len(allowed) == allowed[-1] else f"one of {', '.join(map(str, allowed))}"
        raise InvalidRequestError(f"dimensions must be {shown} with this model, got {dimensions}", "dimensions")

    def _complete(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        room = self._model.max_model_len - num_prompt_tokens
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidRequestError(
                f"the model's context length is {self._model.context_length}, but {num_prompt_tokens + params.max_tokens} were"
                f" asked for: {num_prompt_tokens} in the prompt and {params.max_tokens} in the output (max_tokens)",
                "max_tokens",
                code=CONTEXT_LENGTH_EXCEEDED,
            )
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if params.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most {max_tokens}, what the context length leaves for the output,"
                f" got {params.min_tokens}",
                "min_tokens",
            )
        seed = self._rng.getrandbits(63) if params.seed is None else params.seed
        return dataclasses.replace(
            params, max_tokens=max_tokens, seed=seed, bad_words_token_ids=self._bad_words_token_ids(params.bad_words)
        )

    def _bad_words_token_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """How each word is written at the start of a text and behind a space."""
        encode = self._renderer.tokenizer.encode
        spellings = [text for word in words for stem in [word.lstrip() or word] for text in (stem, " " + stem)]
        sequences = (tuple(encode(text, add_special_tokens=False)) for text in spellings)
        return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))


def check_kind(prompt: object) -> None:
    """Raises `InvalidRequestError` for what is neither text nor a list."""
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise InvalidRequestError(f"the prompt must be text or token ids, got {type(prompt).__name__}", "prompt")


def add_special_tokens(tokenization_kwargs: Mapping[str, Any] | None) -> bool:
    """What they say. Raises `InvalidRequestError` for what they cannot say here."""
    kwargs = dict(tokenization_kwargs or {})
    wanted = kwargs.pop("add_special_tokens", True)
    if kwargs or type(wanted) is not bool:
        got = f"{min(kwargs)!r}" if kwargs else f"add_special_tokens={wanted!r:.80}"
        raise InvalidRequestError(
            f"tokenization_kwargs takes add_special_tokens, True or False; got {got}", "tokenization_kwargs"
        )
    return wanted


def check_options(
    *,
    request_id: str,
    priority: int,
    data_parallel_rank: int | None,
    session_id: str | None,
    cache_salt: str | None,
    timeout_s: float | None,
) -> None:
    """What comes with a prompt from a program: an engine could not even read what is of another type. Raises
    `InvalidRequestError`."""
    if not (is_int(priority) and -(2**31) <= priority < 2**31):
        raise InvalidRequestError(f"priority must be an integer of 32 bits, got {priority!r:.80}", "priority")
    if not (data_parallel_rank is None or is_int(data_parallel_rank)):
        raise InvalidRequestError(
            f"data_parallel_rank must be an integer or None, got {data_parallel_rank!r:.80}", "data_parallel_rank"
        )
    for name, value in (("request_id", request_id), ("session_id", session_id), ("cache_salt", cache_salt)):
        if not is_text(value) and (value is not None or name == "request_id"):
            raise InvalidRequestError(f"{name} must be text that is valid Unicode, got {value!r:.80}", name)
    if timeout_s is not None and not (type(timeout_s) in (int, float) and 0 < timeout_s <= MAX_TIMEOUT_S):
        raise InvalidRequestError(
            f"timeout_s must be a number above 0 and up to {MAX_TIMEOUT_S}, or None, got {timeout_s!r:.80}", "timeout_s"
        )
