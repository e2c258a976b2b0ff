"""The tokenizer from a model directory, and its byte tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from cores.config import ConfigError
from cores.testing import END_OF_TEXT, IM_END, IM_START, make_tiny_model_dir, make_tiny_tokenizer
from gateway.errors import InvalidRequestError
from gateway.tokenizer import Tokenizer

TOKENIZER = Tokenizer(make_tiny_tokenizer())


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_tiny_model_dir(tmp_path / "model")


def test_a_directory_gives_vocabulary_and_special_tokens(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_directory(model_dir)
    assert tokenizer.vocab_size == json.loads((model_dir / "config.json").read_text())["vocab_size"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == (IM_START, IM_END)
    assert tokenizer.eos_token_ids == (2, 0)  # generation_config.json names both
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(tokenizer.encode("the café", False), True) == "the café"


def test_a_token_that_a_parser_looks_for_is_not_left_out(model_dir: Path) -> None:
    text = f"{IM_START}a{IM_END}"
    for shown, expected in (((), "a"), ((IM_START, "no token"), f"{IM_START}a")):
        tokenizer = Tokenizer.from_directory(model_dir, shown)
        ids = tokenizer.encode(text, False)
        assert (len(ids), tokenizer.decode(ids, True), tokenizer.decode(ids, False)) == (3, expected, text)
        assert tokenizer.special_ids == {0, 1, 2} - {ids[0]} if shown else {0, 1, 2}
        table = tokenizer.byte_table(True)
        assert table is not None
        assert table.texts[ids[0]] == (IM_START if shown else "")


def test_eos_comes_from_the_token_when_no_file_gives_its_id(model_dir: Path) -> None:
    (model_dir / "generation_config.json").unlink()
    (model_dir / "config.json").write_text("{}")
    config = {"eos_token": {"content": END_OF_TEXT, "lstrip": False}}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(model_dir)
    assert (tokenizer.eos_token, tokenizer.eos_token_ids, tokenizer.bos_token) == (END_OF_TEXT, (0,), None)


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'.*nowhere' has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_broken_file_is_named(model_dir: Path, name: str) -> None:
    (model_dir / name).write_text("{ not json")
    with pytest.raises(ConfigError, match=name):
        Tokenizer.from_directory(model_dir)


def test_truncation_and_padding_of_a_training_run_are_switched_off() -> None:
    backend = make_tiny_tokenizer()
    backend.enable_truncation(2)
    backend.enable_padding(length=20)
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode("much longer than two", False), True) == "much longer than two"


def test_half_a_surrogate_pair_is_refused_with_its_place() -> None:
    with pytest.raises(InvalidRequestError, match=r"lone surrogate U\+D83D at character 2"):
        TOKENIZER.encode("ab\ud83d", False)


def test_tables_hold_the_bytes_of_every_token_and_hide_special_ones_on_demand() -> None:
    first, second = TOKENIZER.encode("é", False)
    visible, whole = TOKENIZER.byte_table(True), TOKENIZER.byte_table(False)
    assert visible is not None
    assert whole is not None
    assert (whole.bytes_of(first), whole.bytes_of(second)) == (b"\xc3", b"\xa9")
    assert whole.texts[first] is None
    assert (whole.bytes_of(2), visible.bytes_of(2)) == (IM_END.encode(), b"")
    assert whole.bytes_of(TOKENIZER.vocab_size + 1000) == b""  # a padded embedding row


def test_added_tokens_are_plain_text_unless_they_are_spelled_in_bytes() -> None:
    backend = make_tiny_tokenizer()
    backend.add_tokens([AddedToken("two words"), AddedToken("日本")])
    tokenizer = Tokenizer(backend)
    ids = [tokenizer.vocab_size - 2, tokenizer.vocab_size - 1]
    assert [tokenizer.token_bytes(i).decode() for i in ids] == ["two words", "日本"] == [backend.decode([i]) for i in ids]


def test_every_tokens_bytes_are_what_the_library_decodes() -> None:
    for token_id in range(TOKENIZER.vocab_size):
        text = TOKENIZER.token_bytes(token_id).decode(errors="replace")
        assert text == TOKENIZER.decode([token_id], skip_special_tokens=False)


def test_no_text_longer_than_the_longest_token_allows_fits() -> None:
    longest = len(IM_START)
    assert TOKENIZER.max_chars(10) == 10 * max(longest, len(END_OF_TEXT))


def test_a_token_that_swallows_spaces_leaves_no_bound_on_the_text() -> None:
    backend = make_tiny_tokenizer()
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert Tokenizer(backend).max_chars(10) is None


def test_tokens_of_another_kind_have_bytes_too() -> None:
    vocab = {"<unk>": 0, "<0xE6>": 1, "▁the": 2, "re": 3}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend)
    assert tokenizer.byte_table(True) is None
    assert [tokenizer.token_bytes(i) for i in (1, 2, 3, 99)] == [b"\xe6", b" the", b"re", b""]
    assert tokenizer.max_chars(10) is None
