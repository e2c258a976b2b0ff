"""Token ids of one sequence to text: exactness, hold-back, ids in step with text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from cores.sampling_params import SamplingParams
from cores.testing import make_tiny_tokenizer
from gateway.detokenizer import IncrementalDetokenizer
from gateway.tokenizer import Tokenizer

TOKENIZER = Tokenizer(make_tiny_tokenizer())
EOS = 0
ids_strategy = st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=30)
# The bytes of these and of their halves meet often enough to make characters, broken characters and stop strings.
FEW_TOKENS = [*TOKENIZER.encode("日é🙂\xa0", False), *TOKENIZER.encode("ab<", False), EOS]
few_ids = st.lists(st.sampled_from(FEW_TOKENS), max_size=24)
few_stops = st.lists(st.text("ab<é日\ufffd", min_size=1, max_size=4), max_size=3).map(tuple)


def stable_text(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """All whole characters of the ids, and what can become none any more."""
    data = b"".join(TOKENIZER.token_bytes(i) for i in ids if not (skip_special_tokens and i in TOKENIZER.special_ids))
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def detokenize(ids: Sequence[int], prompt: Sequence[int] = (), **params: object) -> tuple[str, list[int], str | None]:
    """(joined text, joined ids, stop string)"""
    detokenizer = IncrementalDetokenizer(TOKENIZER, SamplingParams(**params), prompt)  # type: ignore[arg-type]
    text, out = "", []
    for token_id in ids:
        delta, delta_ids = detokenizer.push(token_id)
        text, out = text + delta, out + delta_ids
        if detokenizer.stop_string is not None:
            break
    delta, delta_ids = detokenizer.finish()
    return text + delta, out + delta_ids, detokenizer.stop_string


@given(ids_strategy | few_ids, st.booleans())
@example(TOKENIZER.encode("naïve 東京 🙂👩‍👩‍👧", False), True)
@example([TOKENIZER.encode("日", False)[0]], True)
def test_pieces_joined_are_the_full_decode(ids: list[int], skip_special_tokens: bool) -> None:
    text, out, _ = detokenize(ids, skip_special_tokens=skip_special_tokens)
    assert text == TOKENIZER.decode(ids, skip_special_tokens)
    assert out == ids


def reference(ids: list[int], stops: tuple[str, ...], include: bool, min_tokens: int) -> tuple[str, list[int], str | None]:
    """What a sequence ends as, by looking at every character of the whole text."""
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    num_chars_after = [len(stable_text(ids[:k])) for k in range(1, len(ids))] + [len(whole)]
    for end in range(1, len(whole) + 1):
        num_tokens = next(k for k, num_chars in enumerate(num_chars_after, start=1) if num_chars >= end)
        completed = [stop for stop in stops if whole[:end].endswith(stop)]
        if completed and num_tokens > min_tokens:
            stop = max(completed, key=len)
            return whole[: end if include else end - len(stop)], ids[:num_tokens], stop
    return whole, ids, None


@given(few_ids, few_stops, st.booleans(), st.integers(0, 6))
def test_stop_strings_cut_where_a_search_over_the_whole_text_would(
    ids: list[int], stops: tuple[str, ...], include: bool, min_tokens: int
) -> None:
    got = detokenize(ids, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    assert got == reference(ids, stops, include, min_tokens)


@given(few_ids, few_stops)
def test_text_and_ids_are_released_as_early_as_they_may_and_in_step(ids: list[int], stops: tuple[str, ...]) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER, SamplingParams(stop=stops), [])
    text, num_out = "", 0
    for k, token_id in enumerate(ids, start=1):
        delta, out = detokenizer.push(token_id)
        if detokenizer.stop_string is not None:
            return
        text, num_out = text + delta, num_out + len(out)
        stable = stable_text(ids[:k])
        starts = (i for i in range(len(stable)) if any(stop != stable[i:] and stop.startswith(stable[i:]) for stop in stops))
        assert text == stable[: next(starts, len(stable))]
        assert out == ids[num_out - len(out) : num_out]
        assert len(stable_text(ids[:num_out])) <= len(text), "ids ran ahead of text"
        for i in range(num_out + 1, k + 1):  # none lags whose text is out and whole
            is_whole = stable_text(ids[:i]) == TOKENIZER.decode(ids[:i], skip_special_tokens=True)
            assert not is_whole or len(stable_text(ids[:i])) > len(text)


def test_first_bytes_of_a_character_are_held_back_with_their_ids() -> None:
    ids = TOKENIZER.encode("日!", False)
    detokenizer = IncrementalDetokenizer(TOKENIZER, SamplingParams(), [])
    assert [detokenizer.push(i) for i in ids] == [("", []), ("", []), ("日", ids[:3]), ("!", ids[3:])]


def test_a_character_cut_off_at_the_end_becomes_a_replacement() -> None:
    ids = TOKENIZER.encode("a日", False)[:-1]
    assert detokenize(ids) == ("a\ufffd", ids, None)


def test_a_prompt_that_ends_inside_a_character_is_completed_and_not_shown() -> None:
    prompt, rest = TOKENIZER.encode("long prompt 日", False), TOKENIZER.encode("本", False)
    assert detokenize([prompt[-1], *rest], prompt[:-1]) == ("日本", [prompt[-1], *rest], None)


def test_a_prompts_broken_character_is_not_shown_either() -> None:
    prompt = TOKENIZER.encode("x日", False)[:-1]
    rest = TOKENIZER.encode("ab", False)
    assert detokenize(rest, prompt) == ("ab", rest, None)


def test_a_byte_that_comes_too_late_does_not_complete_the_prompts_character() -> None:
    *prompt, last = TOKENIZER.encode("日", False)
    letter = TOKENIZER.encode("a", False)
    assert detokenize([*letter, last], prompt) == ("a\ufffd", [*letter, last], None)


@given(few_ids, few_ids)
def test_prompt_and_output_decode_together(prompt: list[int], ids: list[int]) -> None:
    """What is shown is what the output adds to the prompt's own text."""
    shown = TOKENIZER.decode(prompt, True)
    together = TOKENIZER.decode(prompt + ids, True)
    if together.startswith(shown):
        assert detokenize(ids, prompt)[0] == together[len(shown) :]
    else:  # the output completes a character of which the prompt alone shows U+FFFD
        assert shown.endswith("\ufffd")
        assert detokenize(ids, prompt)[0] == together[len(shown) - 1 :]


def test_a_character_begun_behind_a_stop_string_is_not_shown() -> None:
    backend = make_tiny_tokenizer()
    backend.add_tokens(["bæ"])  # as a byte-level token: "b" and the first byte of 日
    tokenizer = Tokenizer(backend)
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop=("b",)), [])
    assert detokenizer.push(tokenizer.vocab_size - 1) == ("", [tokenizer.vocab_size - 1])
    assert detokenizer.finish() == ("", [])


def test_the_replacement_of_a_cut_off_character_may_complete_a_stop_string() -> None:
    ids = TOKENIZER.encode("a日", False)[:-1]
    assert detokenize(ids, stop=("a\ufffd",)) == ("", ids, "a\ufffd")


def test_a_hidden_stop_token_has_an_id_but_no_text() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER, SamplingParams(), [])
    (letter,) = TOKENIZER.encode("a", False)
    detokenizer.push_hidden(letter)
    assert detokenizer.finish() == ("", [letter])


def test_what_looked_like_a_stop_string_comes_out_at_the_end() -> None:
    ids = TOKENIZER.encode("ab<en", False)
    assert detokenize(ids, stop=("<end>",)) == ("ab<en", ids, None)


def test_all_ids_up_to_the_stop_string_are_released_with_the_last_text() -> None:
    ids = TOKENIZER.encode("ab<end>cd", False)
    assert detokenize(ids, stop=("<end>",)) == ("ab", ids[:7], "<end>")


# --- tokenizers of another kind ---------------------------------------------------------------------------------------


def make_sentencepiece_tokenizer() -> Tokenizer:
    """As Llama 2 has it: ▁ for a space, bytes for what has no piece, one space dropped at the start."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "▁a", "▁b"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


SENTENCEPIECE = make_sentencepiece_tokenizer()


def run(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(), prompt)
    pieces, out = [], []
    for token_id in ids:
        text, released = detokenizer.push(token_id)
        pieces.append(text)
        out += released
    text, released = detokenizer.finish()
    assert out + released == list(ids)
    return "".join(pieces) + text


@given(st.text("ab h日é🙂", max_size=20))
def test_without_a_byte_table_pieces_joined_are_the_full_decode(text: str) -> None:
    assert SENTENCEPIECE.byte_table(True) is None
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False)
    assert run(SENTENCEPIECE, ids) == SENTENCEPIECE.decode(ids, True) == text


@given(st.text("ab日 ", min_size=1, max_size=10), st.text("ab日é ", max_size=10))
def test_without_a_byte_table_the_first_space_after_a_prompt_is_kept(prompt: str, text: str) -> None:
    prompt_ids = SENTENCEPIECE.encode(prompt, False)
    ids = SENTENCEPIECE.encode(prompt + " a" + text, False)[len(prompt_ids) :]
    assert run(SENTENCEPIECE, ids, prompt_ids) == " a" + text


@pytest.mark.parametrize("num_special", [1, 20])
def test_without_a_byte_table_special_tokens_inside_are_skipped(num_special: int) -> None:
    ids = [*SENTENCEPIECE.encode("a", False), *[2] * num_special, *SENTENCEPIECE.encode("日b", False)]
    assert run(SENTENCEPIECE, ids) == "a 日b"


def test_without_a_byte_table_a_prompts_partial_character_is_completed() -> None:
    ids = SENTENCEPIECE.encode("a日b", False)
    cut = len(ids) - 3
    assert run(SENTENCEPIECE, ids[cut:], ids[:cut]) == "日b"


@pytest.mark.parametrize("num_bytes", [1, 5, 40])
def test_without_a_byte_table_broken_bytes_are_let_go(num_bytes: int) -> None:
    broken = SENTENCEPIECE.encode("日", False)[-1]
    (letter,) = SENTENCEPIECE.encode("a", False)
    text = run(SENTENCEPIECE, [broken] * num_bytes + [letter])
    assert text.endswith(" a")
    assert set(text) <= {"\ufffd", " ", "a"}
