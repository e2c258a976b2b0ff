"""From logits to tokens: a pure function of (seed, position, logits) and the request's own tokens. Knows no model and no cache.

The order is vLLM's: structured output, allowed tokens, bad words, min_tokens, logit bias, penalties; then, for sampled
requests, temperature, min-p, top-k, top-p and a draw. Equal logits at a threshold are kept together. Log-probabilities are
those of the model, before all of this.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from cores.messages import TokenLogprobs
from cores.request import Request
from cores.runner.interface import ModelRunnerOutput
from cores.runner.noise import draw_key, gumbel_noise, index_hashes
from cores.sampling_params import SamplingParams

# Below this, logits / temperature leave float32's range: the request is greedy.
MIN_TEMPERATURE = 1e-5
# The nucleus of top-p is looked for among so many of the most likely tokens first: a full sort takes 30 times as long.
FIRST_NUCLEUS_WIDTH = 64
# A draw passes over its rows twenty times: on a CPU, so few at a time that they stay in a core's cache.
ROWS_AT_A_TIME = 4
CHUNK = 32  # scores, in the search for the highest
NEG_INF = float("-inf")


class TokenIdError(ValueError):
    """A request names a token that the vocabulary does not have."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens some of the rows may choose."""

    rows: list[int]  # each once
    bits: torch.Tensor  # [len(rows), at least vocabulary / 8] uint8, on the host: bit i of byte j stands for token 8 j + i


class Sampler:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._index_hashes = index_hashes(vocab_size, device)
        self._byte_biases = _byte_biases(device)

    def sample(self, logits: torch.Tensor, requests: Sequence[Request], masks: TokenMasks | None = None) -> ModelRunnerOutput:
        """`logits` [len(requests), vocabulary] float32; they are overwritten. Errors of one request stay with it."""
        if not requests:
            return ModelRunnerOutput([])
        wants_logprobs = [i for i, r in enumerate(requests) if r.sampling_params.logprobs is not None]
        raw = logits[wants_logprobs] if wants_logprobs else None  # a copy
        if masks is not None:
            self._apply(masks, logits)
        errors = self._shape_rows(logits, requests)
        best, token_ids = logits.max(dim=-1)
        errors |= _errors_of_logits(best, skip=errors)
        sampled = [i for i, r in enumerate(requests) if not _is_greedy(r.sampling_params) and i not in errors]
        if sampled:
            token_ids[sampled] = self._draw(logits[sampled], [requests[i] for i in sampled])
        output = ModelRunnerOutput(token_ids.tolist(), errors=errors)
        if raw is not None:
            counts = [requests[i].sampling_params.logprobs or 0 for i in wants_logprobs]
            rows = token_logprobs(raw, token_ids[wants_logprobs], counts)
            output.logprobs = {i: row for i, row in zip(wants_logprobs, rows, strict=True) if i not in errors}
        return output

    def _apply(self, masks: TokenMasks, logits: torch.Tensor) -> None:
        num_rows, vocab_size = len(masks.rows), logits.shape[-1]
        used = masks.bits[:, : -(-vocab_size // 8)].to(logits.device).flatten().int()
        # A sum takes a tenth of the time of a masked fill, and what is not a number stays so.
        biases = self._byte_biases.index_select(0, used).view(num_rows, -1)[:, :vocab_size]
        logits.index_add_(0, torch.tensor(masks.rows, device=logits.device), biases)

    def _shape_rows(self, logits: torch.Tensor, requests: Sequence[Request]) -> dict[int, str]:
        """Applies to each row what its request asks for. Most ask for nothing."""
        errors = {}
        for i, request in enumerate(requests):
            if _needs_shaping(request):
                try:
                    shape_logits(logits[i], request)
                except TokenIdError as error:
                    errors[i] = str(error)
        return errors

    def _draw(self, logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
        keys = [draw_key(r.sampling_params.seed or 0, r.num_output_tokens) for r in requests]
        num_rows = ROWS_AT_A_TIME if logits.device.type == "cpu" else len(requests)
        drawn = []
        for i in range(0, len(requests), num_rows):
            scores = filtered_scores(logits[i : i + num_rows], [r.sampling_params for r in requests[i : i + num_rows]])
            # `max` finds an index in a third of the time of `argmax` on a CPU.
            drawn.append(scores.add_(gumbel_noise(keys[i : i + num_rows], self._index_hashes)).max(dim=-1).indices)
        return torch.cat(drawn)


def _byte_biases(device: torch.device) -> torch.Tensor:
    """[256, 8] float32: for each byte of a mask, 0 for its set bits and -inf for the others."""
    is_set = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.zeros(256, 8).masked_fill_(is_set == 0, NEG_INF).to(device)


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < MIN_TEMPERATURE


def _errors_of_logits(best: torch.Tensor, skip: Collection[int]) -> dict[int, str]:
    """`best` [rows]: a row's highest value, which is NaN if any is."""
    errors = {}
    for i, value in enumerate(best.tolist()):
        if i in skip or NEG_INF < value < float("inf"):
            continue
        if value == NEG_INF:
            errors[i] = "structured_outputs, allowed_token_ids, bad_words, logit_bias and min_tokens leave no token to choose"
        else:
            errors[i] = f"the model's logits are not finite (highest: {value})"
    return errors


# --- what a request does to its logits --------------------------------------------------------------------------------------


def _needs_shaping(request: Request) -> bool:
    p = request.sampling_params
    return (
        _has_penalties(p)
        or bool(p.logit_bias)
        or p.allowed_token_ids is not None
        or bool(p.bad_words_token_ids)
        or (p.min_tokens > 0 and request.num_output_tokens < p.min_tokens)
    )


def _has_penalties(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


def shape_logits(row: torch.Tensor, request: Request) -> None:
    """In place, on one row [vocabulary]. Raises `TokenIdError`."""
    p = request.sampling_params
    if p.allowed_token_ids is not None:
        allowed = _ids(p.allowed_token_ids, row, "allowed_token_ids")
        kept = row[allowed]
        row.fill_(NEG_INF)
        row[allowed] = kept
    if p.bad_words_token_ids:
        row[_ids(_last_of_bad_words(request), row, "bad_words")] = NEG_INF
    if request.num_output_tokens < p.min_tokens:
        row[[i for i in request.stop_ids if i < len(row)]] = NEG_INF
    if p.logit_bias:
        biased = _ids(list(p.logit_bias), row, "logit_bias")
        row[biased] += torch.tensor(list(p.logit_bias.values()), dtype=row.dtype, device=row.device)
    if _has_penalties(p):
        _penalise(row, request)


def _last_of_bad_words(request: Request) -> list[int]:
    """The tokens that would now complete one of the bad words in the output."""
    words = request.sampling_params.bad_words_token_ids
    longest = max(map(len, words))
    begin = max(request.num_original_prompt_tokens, request.num_tokens - longest + 1)
    end = tuple(request.token_ids[begin:])
    return [word[-1] for word in words if len(word) <= len(end) + 1 and end[len(end) - len(word) + 1 :] == word[:-1]]


def _penalise(row: torch.Tensor, request: Request) -> None:
    """Repetition counts prompt and output; presence and frequency count what was generated, here or on another rank."""
    p, tokens = request.sampling_params, torch.tensor(request.token_ids, device=row.device)
    if p.repetition_penalty != 1.0:
        seen = torch.unique(tokens)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    generated, counts = torch.unique(tokens[request.num_original_prompt_tokens :], return_counts=True)
    row[generated] -= p.presence_penalty + p.frequency_penalty * counts


def _ids(token_ids: Sequence[int], row: torch.Tensor, field: str) -> torch.Tensor:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < len(row):
        raise TokenIdError(f"{field} must be at least 0 and below the vocabulary size of {len(row)}, got {list(token_ids)}")
    return torch.tensor(token_ids, dtype=torch.int64, device=row.device)


# --- temperature, min-p, top-k, top-p ---------------------------------------------------------------------------------------


def filtered_scores(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """[rows, vocabulary]: log-probabilities but for a constant per row; -inf for what the row's filters drop."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device)[:, None]

    # The best token's score is 0: no temperature can overflow, and min-p is a comparison with a constant.
    scores = (logits - logits.max(dim=-1, keepdim=True).values).div_(column([p.temperature for p in params]))
    if rows := [i for i, p in enumerate(params) if p.min_p > 0]:
        floor = column([params[i].min_p for i in rows]).log()
        scores[rows] = _drop_below(scores[rows], floor)
    if rows := [i for i, p in enumerate(params) if 0 < p.top_k < logits.shape[-1]]:
        floor = _top_k_floor(scores[rows], [params[i].top_k for i in rows])
        scores[rows] = _drop_below(scores[rows], floor)
    if rows := [i for i, p in enumerate(params) if p.top_p < 1]:
        floor = _top_p_floor(scores[rows], [params[i].top_p for i in rows])
        scores[rows] = _drop_below(scores[rows], floor)
    return scores


def _drop_below(scores: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill_(scores < floor, NEG_INF)


def top_scores(scores: torch.Tensor, k: int) -> torch.Tensor:
    """[rows, k]: the highest of each row, in order.

    They lie in the k chunks with the highest maxima, which are found in a tenth of the time that a selection from all takes.
    """
    num_chunks = scores.shape[-1] // CHUNK
    if 4 * k > num_chunks:
        return scores.topk(k, dim=-1).values
    chunks = scores[:, : num_chunks * CHUNK].view(len(scores), num_chunks, CHUNK)
    best = chunks.amax(dim=-1).topk(k, dim=-1).indices
    candidates = chunks.gather(1, best[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
    return torch.cat((candidates, scores[:, num_chunks * CHUNK :]), dim=-1).topk(k, dim=-1).values


def _top_k_floor(scores: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    """[rows, 1]: the k-th highest score."""
    best = top_scores(scores, max(top_k))
    return best.gather(1, torch.tensor(top_k, device=scores.device)[:, None] - 1)


def _top_p_floor(scores: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    """[rows, 1]: the lowest score of the smallest set of best tokens that has at least the probability `top_p`."""
    wanted = torch.tensor(top_p, dtype=torch.float64, device=scores.device)[:, None]
    log_total = scores.logsumexp(dim=-1, keepdim=True)
    floor = torch.empty_like(log_total)
    pending, width, vocab_size = torch.arange(len(top_p), device=scores.device), FIRST_NUCLEUS_WIDTH, scores.shape[-1]
    while len(pending):
        width = min(width, vocab_size)
        best = top_scores(scores[pending], width)
        mass = (best - log_total[pending]).double().exp().cumsum(dim=-1)
        # A token is in if those before it do not suffice. The first has none before it.
        num_kept = 1 + (mass[:, :-1] < wanted[pending]).sum(dim=-1, keepdim=True)
        floor[pending] = best.gather(1, num_kept - 1)
        if width == vocab_size:
            break
        pending = pending[mass[:, -1] < wanted[pending, 0]]
        width *= 16
    return floor


# --- log-probabilities ------------------------------------------------------------------------------------------------------


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, counts: list[int]) -> list[TokenLogprobs]:
    """For each row the chosen token's log-probability and rank, and its `counts[i]` most likely tokens."""
    columns = zip(counts, *(column.tolist() for column in logprob_columns(logits, token_ids, max(counts))), strict=True)
    return [TokenLogprobs(value, rank, tuple(ids[:n]), tuple(values[:n])) for n, value, rank, ids, values in columns]


def logprob_columns(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row's token its log-probability and rank [rows], and the most likely tokens and theirs [rows, `num_top`]."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    best = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return chosen[:, 0], ranks, best.indices, best.values
