"""What a request knows of itself."""

from __future__ import annotations

from cores.request import Request
from cores.testing import make_request


def test_a_continued_request_counts_output_from_its_original_prompt() -> None:
    message = make_request(1, prompt=[5] * 10, num_original_prompt_tokens=7, max_tokens=9)
    request = Request.from_engine_core_request(3, message, max_model_len=100)
    assert (request.key, request.num_prompt_tokens, request.num_output_tokens, request.max_total_tokens) == ((3, 1), 10, 3, 16)


def test_the_model_length_bounds_what_max_tokens_allows() -> None:
    assert Request.from_engine_core_request(0, make_request(1, prompt=90, max_tokens=50), 100).max_total_tokens == 100
    assert Request.from_engine_core_request(0, make_request(1, prompt=90, max_tokens=None), 100).max_total_tokens == 100


def test_eos_is_a_stop_token_unless_ignored() -> None:
    def stop_ids(**params: object) -> frozenset[int]:
        return Request.from_engine_core_request(0, make_request(1, **params), 100, eos_token_ids=(2, 0)).stop_ids  # type: ignore[arg-type]

    assert stop_ids(ignore_eos=False) == {0, 2}
    assert stop_ids(ignore_eos=False, stop_token_ids=(9,)) == {0, 2, 9}
    assert stop_ids(ignore_eos=True, stop_token_ids=(9,)) == {9}


def test_it_decodes_from_its_first_token_until_it_must_compute_more_than_the_last_one() -> None:
    request = Request.from_engine_core_request(0, make_request(1, prompt=4), 100)
    states = []
    for num_computed, num_tokens in ((0, 4), (3, 4), (4, 5), (9, 10), (0, 10), (8, 10)):
        request.token_ids = [5] * num_tokens
        request.num_computed_tokens = num_computed
        states.append(request.is_decoding)
    assert states == [False, False, True, True, False, False]
