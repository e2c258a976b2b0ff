"""A real encoder: its vectors are those of transformers, and mean what they should.

Pulls the model when it is not on this machine yet.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModel

from gateway.models import pull_model
from gateway.tokenizer import Tokenizer as FrontEndTokenizer
from tests.cores.runner.test_encoder import Engine

TEXTS = [
    "A man is eating food.",
    "Someone has a meal.",
    "The new movie is awesome.",
    "La capitale de la France est Paris.",
    "x",
    "The quick brown fox jumps over the lazy dog. " * 20,
]


def references(model: Path) -> list[torch.Tensor]:
    """Each text alone, without padding: transformers' hidden states, their mean, to length 1."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()  # the file asks for 128 tokens, whatever the text
    tokenizer.no_truncation()
    encoder = AutoModel.from_pretrained(model, attn_implementation="eager").eval()
    vectors = []
    for text in TEXTS:
        with torch.no_grad():
            mean = encoder(input_ids=torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0].mean(dim=0)
        vectors.append(mean / mean.norm())
    return vectors


def test_embeddings_are_those_of_transformers_and_mean_what_they_should() -> None:
    model = pull_model("all-minilm-l6-v2")
    engine, tokenizer = Engine(model), FrontEndTokenizer.from_directory(model)
    assert (engine.info.max_model_len, engine.info.embedding_size) == (256, 384)
    vectors = engine.embed([tokenizer.encode(text, add_special_tokens=True) for text in TEXTS])
    for i, expected in enumerate(references(model)):
        torch.testing.assert_close(vectors[i], expected, rtol=0, atol=1e-5)
    assert vectors[0] @ vectors[1] > 0.5 > 0.3 > vectors[0] @ vectors[2]
