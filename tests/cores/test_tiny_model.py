"""The tiny model directory that tests of all packages build on."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from cores.testing import SPECIAL_TOKENS, make_tiny_model_dir, make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()


@given(st.text(max_size=50))
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_common_words_are_single_tokens_and_specials_have_the_first_ids() -> None:
    assert len(TOKENIZER.encode(" the").ids) == 1
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert TOKENIZER.encode("<|im_start|>user").ids[0] == 1


def test_two_directories_are_byte_for_byte_the_same(tmp_path: Path) -> None:
    first, second = make_tiny_model_dir(tmp_path / "a"), make_tiny_model_dir(tmp_path / "b")
    names = sorted(p.name for p in first.iterdir())
    assert names == ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_config_agrees_with_the_tokenizer(tmp_path: Path) -> None:
    path = make_tiny_model_dir(tmp_path, max_model_len=333, hidden_size=32)
    config = json.loads((path / "config.json").read_text())
    assert config["vocab_size"] == Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab_size()
    assert (config["max_position_embeddings"], config["hidden_size"]) == (333, 32)
