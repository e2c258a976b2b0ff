"""The model's tokenizer, from its directory, without `transformers`.

Theory of operation
-------------------
A byte-level BPE vocabulary spells every token in bytes, and any run of ids decodes to the concatenation of those bytes. So a
table of each token's bytes is a whole decoder, and most tokens are whole characters: their text can be looked up. Tokenizers
of another kind (SentencePiece, WordPiece) have no such table; they are decoded by the library itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from cores.config import ConfigError
from gateway.errors import InvalidRequestError


class ByteTable:
    """What each token id adds to the text. Ids beyond the vocabulary (a model's padded embedding rows) add nothing."""

    __slots__ = ("_partial", "texts")

    def __init__(self, texts: list[str | None], partial: dict[int, bytes]) -> None:
        self.texts = texts  # by id; None for a token that is not whole characters by itself
        self._partial = partial  # the bytes of those

    def bytes_of(self, token_id: int) -> bytes:
        try:
            text = self.texts[token_id]
        except IndexError:
            return b""
        return self._partial[token_id] if text is None else text.encode()


class Tokenizer:
    """Text to ids and back. `special_ids` are those that `skip_special_tokens` leaves out."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        backend.no_truncation()  # some tokenizer.json files carry the settings of a training run
        backend.no_padding()
        self._backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.eos_token_ids = eos_token_ids or self._ids_of(eos_token)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._decoders = _decoder_names(backend)
        self._tables = self._build_tables() if self._decoders == ["ByteLevel"] else None
        # Text that may vanish on the way to ids gives no bound on their number.
        is_lossless = backend.normalizer is None and not any(token.lstrip or token.rstrip for token in added.values())
        self._max_token_chars = self._longest_token() if self._tables and is_lossless else None

    @classmethod
    def from_directory(cls, path: str | Path, shown_tokens: tuple[str, ...] = ()) -> Tokenizer:
        """`shown_tokens` are special to nobody, whatever the file says: they are never left out.

        Raises `ConfigError` that names the file that is missing or cannot be read.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"model directory {str(directory)!r} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
            if any(token.special and token.content in shown_tokens for token in backend.get_added_tokens_decoder().values()):
                backend = tokenizers.Tokenizer.from_str(_with_shown_tokens(backend.to_str(), shown_tokens))
        except Exception as error:  # the library raises bare Exception for a file that it cannot use
            raise ConfigError(f"{file} is not a tokenizer: {error}") from error
        config = read_json(directory / "tokenizer_config.json")
        return cls(
            backend,
            bos_token=_token_text(config.get("bos_token")),
            eos_token=_token_text(config.get("eos_token")),
            eos_token_ids=_eos_token_ids(directory),
        )

    # --- text and ids -------------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises `InvalidRequestError` for text that is no Unicode: a JSON string may hold half of a surrogate pair."""
        try:
            # As a batch of one: unlike `encode` it lets go of the GIL, and without offsets it takes half the time.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequestError(
                    f"the prompt is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
                ) from None
            raise

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def byte_table(self, skip_special_tokens: bool) -> ByteTable | None:
        """The decoder of a byte-level BPE vocabulary; None for a tokenizer of another kind."""
        return None if self._tables is None else self._tables[skip_special_tokens]

    def token_bytes(self, token_id: int) -> bytes:
        """What a token means by itself, special tokens included. Bytes that are no whole character stay as they are."""
        if self._tables is not None:
            return self._tables[False].bytes_of(token_id)
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteFallback" in self._decoders and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        text = self.decode([token_id], skip_special_tokens=False)
        # SentencePiece writes a space as ▁, and its decoder drops one at the start of a text; this is not the start.
        return (" " + text if token.startswith("▁") and not text.startswith(" ") else text).encode()

    def max_chars(self, num_tokens: int) -> int | None:
        """No text longer than this fits in so many tokens; None when that is not known."""
        return None if self._max_token_chars is None else num_tokens * self._max_token_chars

    # --- construction -------------------------------------------------------------------------------------------------

    def _ids_of(self, token: str | None) -> tuple[int, ...]:
        token_id = None if token is None else self._backend.token_to_id(token)
        return () if token_id is None else (token_id,)

    def _build_tables(self) -> tuple[ByteTable, ByteTable]:
        """(with the text of special tokens, without)"""
        vocab = self._backend.get_vocab(with_added_tokens=True)
        texts: list[str | None] = [""] * (max(vocab.values(), default=-1) + 1)
        partial: dict[int, bytes] = {}
        for token, token_id in vocab.items():
            data = _spelled_bytes(token)
            try:
                texts[token_id] = data.decode()
            except UnicodeDecodeError:
                texts[token_id] = None
                partial[token_id] = data
        visible = list(texts)
        for token_id in self.special_ids:
            visible[token_id] = ""
        return ByteTable(texts, partial), ByteTable(visible, partial)

    def _longest_token(self) -> int:
        assert self._tables is not None
        table = self._tables[False]
        # A token that is part of characters begins or completes at most one for each of its bytes.
        return max((len(table.bytes_of(i) if text is None else text) for i, text in enumerate(table.texts)), default=1)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no such file. Raises `ConfigError` for anything else."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def _with_shown_tokens(tokenizer: str, shown_tokens: tuple[str, ...]) -> str:
    # The library has no call for it: what was added as special stays so.
    document = json.loads(tokenizer)
    for token in document["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in shown_tokens
    return json.dumps(document)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_spelling() -> dict[str, int]:
    """How byte-level BPE writes bytes: printable Latin-1 as itself, the others, in order, as the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_spelling()
_ALPHABET = frozenset(_BYTE_OF)
_TO_LATIN_1 = str.maketrans({char: chr(byte) for char, byte in _BYTE_OF.items()})


def _spelled_bytes(token: str) -> bytes:
    # An added token may hold other characters; the library then takes all of it as plain text.
    return token.translate(_TO_LATIN_1).encode("latin-1") if _ALPHABET.issuperset(token) else token.encode()


def _decoder_names(backend: tokenizers.Tokenizer) -> list[str]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


def _token_text(value: Any) -> str | None:
    """Configuration files write a special token as its text or as an object that holds it."""
    return value.get("content") if isinstance(value, dict) else value


def _eos_token_ids(directory: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    return ()
