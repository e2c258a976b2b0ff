"""Log-probabilities as readers get them."""

from __future__ import annotations

from cores.messages import TokenLogprobs
from cores.testing import IM_END, make_tiny_tokenizer
from gateway.logprobs import position_logprobs
from gateway.tokenizer import Tokenizer

TOKENIZER = Tokenizer(make_tiny_tokenizer())


def test_tokens_have_their_rank_text_and_exact_bytes() -> None:
    (the,) = TOKENIZER.encode(" the", False)
    position = position_logprobs(TOKENIZER, the, TokenLogprobs(-2.5, 7, (2, the), (-0.5, -1.0)))
    assert (position.chosen.token_id, position.chosen.logprob, position.chosen.rank) == (the, -2.5, 7)
    assert (position.chosen.text, position.chosen.bytes_) == (" the", b" the")
    assert [(top.token_id, top.rank, top.logprob, top.text) for top in position.top] == [
        (2, 1, -0.5, IM_END),
        (the, 2, -1.0, " the"),
    ]


def test_part_of_a_character_is_escaped_and_never_a_replacement_character() -> None:
    first, *_ = TOKENIZER.encode("日", False)
    chosen = position_logprobs(TOKENIZER, first, TokenLogprobs(-0.1, 1, (), ())).chosen
    assert (chosen.text, chosen.bytes_) == ("\\xe6", b"\xe6")
