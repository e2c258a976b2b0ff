"""A GGUF file becomes a Hugging Face directory with the same weights, tokenizer and chat template."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from cores.convert_gguf import convert
from cores.testing import CHAT_TEMPLATE, SPECIAL_TOKENS, make_tiny_tokenizer

DIM, HEADS, KV_HEADS, FEED_FORWARD = 32, 4, 2, 64


def write_gguf(path: Path, pre_tokenizer: str = "smollm", chat_template: str | None = CHAT_TEMPLATE) -> dict[str, np.ndarray]:
    """A Llama of one layer with random weights; returns them by their GGUF names."""
    tokenizer = make_tiny_tokenizer()
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(DIM // HEADS)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([token for token, _ in vocab])
    kinds = dict.fromkeys(SPECIAL_TOKENS, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token, _ in vocab])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    weights = _random_weights(len(vocab))
    for name, value in weights.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _random_weights(vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    head_dim = DIM // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab_size, DIM),
        "output_norm.weight": (DIM,),
        "blk.0.attn_norm.weight": (DIM,),
        "blk.0.ffn_norm.weight": (DIM,),
        "blk.0.attn_q.weight": (HEADS * head_dim, DIM),
        "blk.0.attn_k.weight": (KV_HEADS * head_dim, DIM),
        "blk.0.attn_v.weight": (KV_HEADS * head_dim, DIM),
        "blk.0.attn_output.weight": (DIM, DIM),
        "blk.0.ffn_gate.weight": (FEED_FORWARD, DIM),
        "blk.0.ffn_up.weight": (FEED_FORWARD, DIM),
        "blk.0.ffn_down.weight": (DIM, FEED_FORWARD),
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_converted_directory_is_whole(tmp_path: Path) -> None:
    weights, out = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "out"
    command = [sys.executable, "-m", "cores.convert_gguf", str(tmp_path / "tiny.gguf"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr

    stored = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    embedding = torch.from_numpy(weights["token_embd.weight"]).bfloat16()
    assert torch.equal(stored["model.embed_tokens.weight"], embedding)
    assert (read_json(out / "config.json")["model_type"], read_json(out / "config.json")["num_key_value_heads"]) == ("llama", 2)
    assert read_json(out / "generation_config.json")["eos_token_id"] == [2]
    assert read_json(out / "tokenizer_config.json")["eos_token"] == "<|im_end|>"
    assert read_json(out / "tokenizer_config.json")["model_max_length"] == 128
    assert (out / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    AutoModelForCausalLM.from_pretrained(out)

    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    text = "<|im_start|>user\nthe water of Paris<|im_end|>"
    assert tokenizer.encode(text).ids == make_tiny_tokenizer().encode(text).ids
    assert tokenizer.encode("  12").tokens == ["Ġ", "Ġ", "1", "2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pre_tokenizer": "deepseek-llm"}, "pre-tokenizer 'deepseek-llm' is not known"),
        ({"chat_template": None}, "not a chat model"),
    ],
)
def test_a_file_that_would_be_converted_wrongly_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", **settings)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
