"""Turns one GGUF file into a Hugging Face directory: `python -m cores.convert_gguf FILE.gguf DIRECTORY`.

A program of its own because it needs torch and transformers, which its caller, the front end's command line, never loads.
It knows nothing of where the file came from, and it is not atomic: the caller renames a finished directory into place.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

# What llama.cpp calls the pre-tokenizer that a byte-level BPE model was trained with -> are digits split one by one?
# transformers converts every one of them to a plain byte-level split, which is wrong for the ones that are True here:
# "  1" would become " ", " 1" where the model has only ever seen "  ", "1".
SPLITS_DIGITS = {"gpt-2": False, "smollm": True}


def convert(gguf_file: Path, directory: Path) -> None:
    """Writes config, bf16 weights, tokenizer, chat template, generation config. Raises `ValueError` if the file lacks any."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    folder, name = str(gguf_file.parent), gguf_file.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    if tokenizer.eos_token_id is None or tokenizer.chat_template is None:
        raise ValueError(f"{gguf_file} has no end-of-sequence token or no chat template: it is not a chat model")
    _set_pre_tokenizer(tokenizer.backend_tokenizer, _pre_tokenizer_name(gguf_file))
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=name, dequantize=True),
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _pre_tokenizer_name(gguf_file: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(gguf_file).get_field("tokenizer.ggml.pre")
    return str(field.contents()) if field is not None else "gpt-2"


def _set_pre_tokenizer(backend: Any, name: str) -> None:
    from tokenizers import pre_tokenizers

    if name not in SPLITS_DIGITS:
        raise ValueError(f"pre-tokenizer {name!r} is not known; known are {', '.join(SPLITS_DIGITS)}")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if SPLITS_DIGITS[name] else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cores.convert_gguf", description=convert.__doc__)
    parser.add_argument("gguf_file", type=Path)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    try:
        convert(args.gguf_file, args.directory)
    except ModuleNotFoundError as error:
        print(f"{error}: converting a model needs the engine's packages, `pip install 'dp-gateway[cores]'`", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
