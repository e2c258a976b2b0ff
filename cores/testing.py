"""Helpers that tests of all three packages share: a tiny model directory, a clock that tests move, request builders.

Shipped, so that users can test what they build on the engine. Needs `tokenizers` beside the standard library, not torch:
the tiny directory has no weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cores.messages import EngineCoreRequest
from cores.sampling_params import SamplingParams

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)  # ids 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Single tokens together with the space before them; every other text is spelled in bytes.
_WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part Paris France capital
"""


def make_tiny_model_dir(path: Path, *, max_model_len: int = 2048, **config_overrides: Any) -> Path:
    """Writes a Hugging Face style directory without weights: Llama config, byte-level BPE tokenizer, chat template.

    Any UTF-8 text has tokens and decodes to itself. `config_overrides` go into config.json. Equal arguments give equal bytes.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tiny_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(path / "config.json", _llama_config(tokenizer.get_vocab_size(), max_model_len) | config_overrides)
    _write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2})
    _write_json(path / "tokenizer_config.json", _tokenizer_config(max_model_len))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return path


def make_tiny_tokenizer() -> Tokenizer:
    """Special tokens, 256 bytes, and the common words above. Merges are written down, not trained: no run differs."""
    vocab = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in _WORDS.split():
        spelling = "Ġ" + word  # Ġ is how byte-level BPE writes a space; every merge starts there, so none gets in another's way
        for i in range(1, len(spelling)):
            left, right = spelling[:i], spelling[i]
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _llama_config(vocab_size: int, max_model_len: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def _tokenizer_config(max_model_len: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_model_len,
        "bos_token": IM_START,
        "eos_token": IM_END,
        "pad_token": IM_END,
        "unk_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


class ManualClock:
    """A clock that only moves when told to. Also a `sleep` that returns at once and moves it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_request(
    handle: int = 1,
    prompt: list[int] | int = 10,
    *,
    num_original_prompt_tokens: int | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    lora_name: str | None = None,
    lora_id: str | None = None,
    **params: Any,
) -> EngineCoreRequest:
    """A request with defaults that suit tests: greedy, 8 tokens, EOS ignored. An int `prompt` is a length."""
    prompt_token_ids = [3 + (handle * 7919 + i) % 251 for i in range(prompt)] if isinstance(prompt, int) else prompt
    settings = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "seed": handle} | params
    return EngineCoreRequest(
        handle=handle,
        request_id=f"request-{handle}",
        prompt_token_ids=prompt_token_ids,
        sampling_params=SamplingParams(**settings),
        arrival_time_s=0.0,
        num_original_prompt_tokens=len(prompt_token_ids) if num_original_prompt_tokens is None else num_original_prompt_tokens,
        priority=priority,
        cache_salt=cache_salt,
        lora_name=lora_name,
        lora_id=lora_id,
    )
