from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.cli import COMMANDS, Parser, main
from gateway.cli.serve import add_parser, configuration
from gateway.cli.settings import ENVIRONMENT, Settings
from gateway.config import ConfigError, GatewayConfig


def parse(*words: str, environment: dict[str, str] | None = None) -> GatewayConfig:
    """What `gateway serve MODEL words…` would run with."""
    parser = Parser(prog="gateway")
    add_parser(parser.add_subparsers(parser_class=Parser))
    return configuration(vars(parser.parse_args(["serve", "some-model", *words])), environment or {})


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    return str(file)


def usage_error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr of a command line that must be refused with exit code 2."""
    try:
        code: Any = main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.strip()


def test_defaults_are_those_of_the_dataclasses() -> None:
    config = parse()
    assert config.server == GatewayConfig().server
    assert config.parallel == GatewayConfig().parallel
    assert config.engine.model == "some-model"


def test_every_setting_has_help_with_its_default_and_unit() -> None:
    settings = {setting.key: setting for setting in Settings().all}
    assert all(setting.help for setting in settings.values())
    assert settings["port"].help.endswith("(default: 8000)")
    assert ", in s (default: 60.0)" in settings["stall-timeout"].help
    assert settings["enable-prefix-caching"].help.endswith("(default: on)")
    assert settings["simulated"].help.endswith("(default: step_ms=5 prefill_us=20 seq_us=20 ctx_ns=0)")


def test_flags_of_each_kind() -> None:
    config = parse(
        "-dp", "4", "--max-num-queued-reqs", "7", "--no-enable-prefix-caching", "--api-key", "a", "b", "--stall-timeout", "1.5",
        "--data-parallel-backend", "mp", "--engine", "simulated", "--simulated", "step_ms=3", "fault=die_at_step=4",
    )  # fmt: skip
    assert config.parallel.data_parallel_size == 4
    assert config.admission.max_num_queued_requests == 7
    assert config.engine.enable_prefix_caching is False
    assert config.server.api_key == ("a", "b")
    assert config.fault.stall_timeout == 1.5
    assert config.parallel.data_parallel_backend == "mp"
    assert (config.engine.simulated.step_ms, config.engine.simulated.fault) == (3.0, "die_at_step=4")


def test_vllms_short_flags_and_underscores_are_understood() -> None:
    config = parse(
        "-dp", "4", "-dph", "-dpl", "2", "-dpr", "1", "-dpa", "127.0.0.2", "-dpp", "29999", "-dpb", "mp", "-asc", "2",
        "--max_num_seqs", "8", "--no_enable_prefix_caching", "--served_model_name=under_score",
    )  # fmt: skip
    parallel = config.parallel
    assert (parallel.data_parallel_size, parallel.data_parallel_hybrid_lb, parallel.ranks) == (4, True, (1, 2))
    assert (parallel.data_parallel_address, parallel.data_parallel_rpc_port) == ("127.0.0.2", 29999)
    assert (parallel.data_parallel_backend, config.server.api_server_count) == ("mp", 2)
    assert (config.engine.max_num_seqs, config.engine.enable_prefix_caching) == (8, False)
    assert config.server.served_model_name == ("under_score",)
    assert parse("-dp", "2", "-dpe", "-dpn", "1").parallel.ranks == (1,)


def test_a_list_that_is_given_in_several_flags_has_them_all() -> None:
    config = parse(
        "--api-key",
        "a",
        "--served-model-name",
        "x",
        "--api-key",
        "b",
        "c",
        "--engine",
        "simulated",
        "--simulated",
        "step_ms=3",
        "--simulated",
        "seq_us=1",
    )
    assert (config.server.api_key, config.server.served_model_name) == (("a", "b", "c"), ("x",))
    assert (config.engine.simulated.step_ms, config.engine.simulated.seq_us) == (3.0, 1.0)


def test_adapters_are_named_on_the_command_line_and_in_a_file(tmp_path: Path) -> None:
    expected = ("a=/x/a", "b=/x/b=c")
    config = parse("--enable-lora", "--max-loras", "2", "--lora-modules", "a=/x/a", "b=/x/b=c")
    assert (config.engine.enable_lora, config.engine.max_loras, config.engine.lora_modules) == (True, 2, expected)
    file = write(tmp_path, "enable-lora: true\nlora-modules: [a=/x/a, b=/x/b=c]\n")
    assert parse("--config", file).engine.lora_modules == expected


def test_yaml_takes_dashes_underscores_aliases_and_negations(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "data_parallel_size: 2\nmax-num-queued-reqs: 3\nno-enable-prefix-caching: true\nserved-model-name: one\n"
        "api_key: [a, b]\nstall-timeout: 5\nengine: simulated\nsimulated: {step_ms: 4}\n",
    )
    config = parse("--config", file)
    assert config.parallel.data_parallel_size == 2
    assert config.admission.max_num_queued_requests == 3
    assert config.engine.enable_prefix_caching is False
    assert config.server.served_model_name == ("one",)
    assert config.server.api_key == ("a", "b")
    assert config.fault.stall_timeout == 5.0
    assert config.engine.simulated.step_ms == 4.0


def test_rays_word_for_a_cluster_of_its_own_is_an_embedded_one() -> None:
    assert parse(environment={"RAY_ADDRESS": "local"}).parallel.ray_address is None
    assert parse("--ray-address", "local", environment={"RAY_ADDRESS": "10.0.0.1:6379"}).parallel.ray_address is None


def test_null_in_a_file_is_none_where_none_is_the_default(tmp_path: Path) -> None:
    file = write(tmp_path, "uds: null\nmax-model-len:\napi-key: ~\n")
    config = parse("--config", file, environment={"GATEWAY_API_KEY": "env"})
    assert (config.server.uds, config.engine.max_model_len, config.server.api_key) == (None, None, ())
    with pytest.raises(ConfigError, match="port must be a whole number, got None"):
        parse("--config", write(tmp_path, "port:"))


def test_flag_beats_file_and_file_beats_environment(tmp_path: Path) -> None:
    environment = {"GATEWAY_API_KEY": "env", "GATEWAY_ENGINE_READY_TIMEOUT_S": "50", "GATEWAY_OUTPUT_PROC_CHUNK_SIZE": "9"}
    file = write(tmp_path, "api-key: file\nengine-ready-timeout: 40\n")
    config = parse("--config", file, "--api-key", "flag", environment=environment)
    assert config.server.api_key == ("flag",)
    assert config.fault.engine_ready_timeout == 40.0
    assert config.output_chunk_size == 9


def test_every_documented_environment_variable_has_its_setting() -> None:
    texts = dict.fromkeys(ENVIRONMENT, "1")
    config = parse(environment=texts)
    assert config.server.api_key == ("1",)
    assert config.output_chunk_size == 1
    assert config.fault.keep_alive_on_engine_death is True
    assert config.fault.engine_ready_timeout == 1.0
    assert config.parallel.ray_address == "1"


def test_empty_environment_variable_counts_as_not_set() -> None:
    assert parse(environment=dict.fromkeys(ENVIRONMENT, "")) == parse()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"GATEWAY_OUTPUT_PROC_CHUNK_SIZE": "many"}, "GATEWAY_OUTPUT_PROC_CHUNK_SIZE must be a whole number, got 'many'"),
        ({"GATEWAY_KEEP_ALIVE_ON_ENGINE_DEATH": "maybe"}, "GATEWAY_KEEP_ALIVE_ON_ENGINE_DEATH must be one of 1, true"),
    ],
)
def test_bad_environment_variable_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(environment=environment)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "unknown key 'prot'; did you mean 'port'?"),
        ("max_num_seq: 1", "unknown key 'max_num_seq'; did you mean 'max-num-seqs'?"),
        ("no-port: true", "unknown key 'no-port'"),
        ("port: high", "port must be a whole number, got 'high'"),
        ("port: true", "port must be a whole number, got True"),
        ("enable-prefix-caching: 1", "enable-prefix-caching must be true or false, got 1"),
        ("host: 1", "host must be text, got 1"),
        ("port: 70000", "--port must be at most 65535, got 70000"),
        ("simulated: {step: 1}", "yaml: simulated takes KEY=VALUE"),
        ("[1, 2]", "must hold keys and values, got a list"),
        ("a: b: c", "is not YAML"),
    ],
)
def test_bad_yaml_names_key_value_and_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--config", write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cost_model_in_a_file_does_not_start_the_real_engine_without_a_word(tmp_path: Path) -> None:
    file = write(tmp_path, "simulated: {step_ms: 50}\n")
    with pytest.raises(ConfigError, match="--simulated needs --engine simulated, got --engine torch"):
        parse("--config", file)
    assert parse("--config", file, "--engine", "simulated").engine.simulated.step_ms == 50.0


def test_missing_config_file_is_named() -> None:
    with pytest.raises(ConfigError, match="--config /no/such: No such file"):
        parse("--config", "/no/such")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve",), "gateway serve: MODEL is missing"),
        (("serve", "m", "--prot", "1"), "gateway serve: unknown flag --prot; did you mean '--port'?"),
        (("serve", "m", "--port=x"), "gateway serve: argument --port: must be a whole number, got 'x'"),
        (("serve", "m", "--max-model", "1"), "gateway serve: unknown flag --max-model; did you mean '--max-model-len'?"),
        (("serve", "m", "n"), "gateway serve: unexpected argument 'n'"),
        (("serve", "m", "-dp", "0"), "gateway serve: --data-parallel-size must be at least 1, got 0"),
        (("serve", "m", "-dp", "100000"), "gateway serve: --data-parallel-size must be at most 1024, got 100000"),
        (("serve", "m", "--metrics-prefix", "a b"), "gateway serve: --metrics-prefix must be letters, digits"),
        (
            ("serve", "m", "-dp", "2", "--data-parallel-external-lb", "--data-parallel-rank", "2"),
            "gateway serve: --data-parallel-rank must be below --data-parallel-size (2), got 2",
        ),
        (
            ("serve", "m", "--data-parallel-external-lb"),
            "gateway serve: --data-parallel-external-lb needs --data-parallel-rank",
        ),
        (
            ("serve", "m", "-dp", "4", "--data-parallel-hybrid-lb", "--data-parallel-external-lb", "--data-parallel-rank", "0"),
            "gateway serve: --data-parallel-external-lb and --data-parallel-hybrid-lb exclude each other",
        ),
        (
            ("serve", "m", "-dp", "4", "--data-parallel-size-local", "2"),
            "gateway serve: --data-parallel-size-local needs --data-parallel-hybrid-lb or one of the external modes",
        ),
        (
            ("serve", "m", "-dp", "4", "--data-parallel-start-rank", "0"),
            "gateway serve: --data-parallel-start-rank needs --data-parallel-hybrid-lb or one of the external modes",
        ),
        (
            ("serve", "m", "-dp", "2", "--data-parallel-hybrid-lb", "--data-parallel-start-rank", "2"),
            "gateway serve: --data-parallel-start-rank plus --data-parallel-size-local must be at most"
            " --data-parallel-size (2), got 2 and 1",
        ),
        (
            (
                "serve",
                "m",
                "-dp",
                "2",
                "--data-parallel-hybrid-lb",
                "--data-parallel-size-local",
                "1",
                "--data-parallel-address",
                "10.0.0.7",
                "--data-parallel-backend",
                "mp",
            ),
            "gateway serve: --data-parallel-address 10.0.0.7 is not a loopback address: endpoints then need a shared secret,",
        ),
        (("serve", "m", "--api-key", ""), "gateway serve: --api-key must not be empty"),
        (("serve", "m", "--api-key", "a", " "), "gateway serve: --api-key must not be empty"),
        (("serve", "m", "--served-model-name", ""), "gateway serve: --served-model-name must not be empty"),
        (("serve", "m", "--host", ""), "gateway serve: --host must not be empty"),
        (("serve", "m", "--config", ""), "gateway serve: --config : No such file or directory"),
        (("serve", "m", "--lora-modules", "a=b"), "gateway serve: --lora-modules needs --enable-lora"),
        (("serve", "m", "--enable-lora", "--lora-modules", "a"), "gateway serve: --lora-modules takes NAME=PATH, got 'a'"),
        (
            ("serve", "m", "--served-model-name", "a", "--enable-lora", "--lora-modules", "a=b"),
            "gateway serve: --lora-modules: 'a' is a name of the model itself (--served-model-name)",
        ),
        (("serve", "m", "--load-balancing-policy", "x"), "gateway serve: --load-balancing-policy must be one of"),
        (
            ("serve", "m", "-dp", "2", "--dispatch-order", "shortest"),
            "gateway serve: --dispatch-order shortest needs --dispatch late",
        ),
        (("serve", "m", "--dispatch", "late"), "gateway serve: --dispatch late needs several ranks behind this endpoint"),
        (("serve", "m", "--dispatch", "x"), "gateway serve: --dispatch must be one of early, late, got 'x'"),
        (("serve", "m", "--engine", "x"), "gateway serve: --engine must be one of torch, simulated, vllm, got 'x'"),
        (("serve", "m", "--simulated", "x"), "gateway serve: --simulated takes KEY=VALUE"),
        (
            ("serve", "m", "--simulated", "step_ms=5"),  # its default: that it was said counts
            "gateway serve: --simulated needs --engine simulated, got --engine torch",
        ),
        (("serve", "/no/such/model"), "gateway serve: MODEL must be a directory with a config.json"),
        (("serv",), "gateway: unknown command 'serv'; did you mean 'serve'?"),
        (("--nope",), "gateway: unknown flag --nope"),
        ((), "gateway: a command is missing: one of serve"),
    ],
)
def test_bad_usage_is_one_clear_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert usage_error(capsys, *words).startswith(message)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)
