"""The table of docs/from-vllm.md, given to the parser; and what is said to flags of vLLM's that are not taken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cores.config import ConfigError
from cores.vllm_mapping import parse_vllm_args
from gateway.cli import main
from gateway.cli.serve import add_parser, configuration
from gateway.cli.settings import Settings
from gateway.cli.vllm_flags import HARMLESS, REFUSED
from gateway.config import GatewayConfig

TABLE = Path(__file__).parents[3] / "docs" / "from-vllm.md"

SAYS_THE_DEFAULT = {"--enable-prefix-caching", "--no-enable-log-requests", "--log-level INFO"}


def parse(*words: str) -> GatewayConfig:
    from gateway.cli import Parser

    parser = Parser(prog="gateway")
    add_parser(parser.add_subparsers(parser_class=Parser))
    return configuration(vars(parser.parse_args(["serve", "some-model", *words])), {})


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a refused command line ends with."""
    try:
        code: Any = main(["serve", "some-model", *words])
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    return err.strip()


def table() -> list[tuple[str, str]]:
    """Each command of the first column, and the first word of the second."""
    rows = re.findall(r"^\| (`-.*?) \| (\w+)", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    return [(words, stance) for commands, stance in rows for words in re.findall(r"`(.+?)`", commands)]


def test_the_table_has_flags_of_each_kind() -> None:
    stances = [stance for _, stance in table()]
    assert set(stances) == {"works", "taken", "refused"}
    assert len(stances) > 60


@pytest.mark.parametrize(("words", "stance"), table())
def test_a_flag_does_what_the_table_says(capsys: pytest.CaptureFixture[str], words: str, stance: str) -> None:
    if stance == "refused":
        assert "is vLLM's, and is not supported here: " in refusal(capsys, *words.split())
    elif stance == "taken":
        assert parse(*words.split()) == parse()
    else:
        assert (parse(*words.split()) == parse()) is (words in SAYS_THE_DEFAULT)


def test_no_flag_of_vllms_that_is_refused_or_needless_is_one_of_ours() -> None:
    ours = {name.lstrip("-") for setting in Settings().all for name in (setting.key, *setting.aliases)}
    assert not ours & (HARMLESS.keys() | REFUSED.keys())
    assert not HARMLESS.keys() & REFUSED.keys()


def test_what_is_left_to_vllms_engine_can_be_given_to_it() -> None:
    names = [name for name, why in REFUSED.items() if "--vllm-args" in why]
    assert len(names) > 20
    assert parse_vllm_args([f"{name}=1" for name in names]).keys() == {name.replace("-", "_") for name in names}


def test_a_refused_flag_says_why_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "-tp", "4") == (
        "gateway serve: --tensor-parallel-size 4 is vLLM's, and is not supported here: a rank is one process with one device;"
        " use --data-parallel-size for more devices"
    )
    assert refusal(capsys, "--uvicorn-log-level=warning").endswith("--log-level says that")
    assert refusal(capsys, "-q", "awq").startswith("gateway serve: -q is vLLM's")
    assert "did you mean '--port'" in refusal(capsys, "--prot", "1")


def test_a_file_of_vllms_is_read_in_the_same_way() -> None:
    settings = Settings()
    read = settings.from_mapping({"tensor-parallel-size": 1, "max_model_len": "32K", "dtype": "half", "seed": 3}, "f.yaml")
    assert read == {"max-model-len": 32768, "dtype": "float16", "seed": 3}
    for document in ({"tensor_parallel_size": 2}, {"quantization": "awq"}, {"enable-chunked-prefill": False}):
        with pytest.raises(ConfigError, match=r"^f\.yaml: --.* is vLLM's, and is not supported here: "):
            settings.from_mapping(document, "f.yaml")


def test_values_may_be_written_as_vllms() -> None:
    config = parse(
        "--dtype", "float", "--max-model-len", "2.5k", "--kv-cache-memory-bytes", "4G", "--allowed-origins", '["https://a.b"]',
        "--log-level", "DEBUG", "--enable-lora", "--lora-modules", '{"name": "a", "path": "/x"}',
    )  # fmt: skip
    engine = config.engine
    assert (engine.dtype, engine.max_model_len, engine.kv_cache_memory_bytes) == ("float32", 2500, 4 << 30)
    assert (config.server.allowed_origins, config.log_level) == (("https://a.b",), "debug")
    assert parse("--num-gpu-blocks-override", "9").engine.num_kv_blocks == 9


@pytest.mark.parametrize("text", ["2.5K", "k", "1.0005k", "8q"])
def test_a_number_that_is_not_whole_is_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert "must be a whole number" in refusal(capsys, "--max-model-len", text)


def test_tool_choice_flags_that_contradict_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs --tool-call-parser" in refusal(capsys, "--enable-auto-tool-choice")
    assert "leave both out" in refusal(capsys, "--no-enable-auto-tool-choice", "--tool-call-parser", "hermes")


def test_the_model_may_be_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    from gateway.cli import Parser

    parser = Parser(prog="gateway")
    add_parser(parser.add_subparsers(parser_class=Parser))
    assert configuration(vars(parser.parse_args(["serve", "--model", "m", "-dp", "2"])), {}).engine.model == "m"
