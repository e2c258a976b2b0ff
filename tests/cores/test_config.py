"""Settings: where they are checked, how they cross to a child process, and what a wrong one is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cores.config import (
    UNIX_SOCKETS,
    ConfigError,
    EngineConfig,
    EngineLaunch,
    FrontEndAddress,
    SimulatedConfig,
    Transport,
    from_plain,
    to_plain,
)


def test_a_launch_survives_the_way_through_json() -> None:
    launch = EngineLaunch(
        rank=1,
        epoch=2,
        local_rank=0,
        config=EngineConfig(model="m", engine="simulated", simulated=SimulatedConfig(step_ms=1.5, fault="die_at_step=1")),
        control_address="ipc://control",
        front_ends=(FrontEndAddress(index=0, input_address="ipc://in", output_address="ipc://out"),),
        num_threads=3,
        transport=Transport(host="10.0.0.1", curve_secret="s" * 40),
    )
    assert from_plain(EngineLaunch, json.loads(json.dumps(to_plain(launch)))) == launch
    assert "s" * 40 not in repr(launch)


def test_sockets_lie_in_a_directory_or_get_a_port_of_their_own() -> None:
    assert UNIX_SOCKETS.address("/run/x", "control") == "ipc:///run/x/control"
    assert Transport(host="10.0.0.1").address("/run/x", "control") == "tcp://10.0.0.1:0"
    assert Transport(host="fd00::1").address("/run/x", "control") == "tcp://[fd00::1]:0"


def test_an_unknown_setting_is_told_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'blocksize'; did you mean 'block_size'"):
        from_plain(EngineConfig, {"blocksize": 8})
    with pytest.raises(ConfigError, match="unknown setting 'stepms'; did you mean 'step_ms'"):
        from_plain(EngineConfig, {"simulated": {"stepms": 8}})
    with pytest.raises(ConfigError, match=r"unknown setting 'zzz'$"):
        from_plain(EngineConfig, {"zzz": 8})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine": "quantum"}, "--engine must be one of torch, simulated, vllm, got 'quantum'"),
        ({"block_size": 0}, "--block-size must be at least 1, got 0"),
        ({"max_num_seqs": -1}, "--max-num-seqs must be at least 1, got -1"),
        ({"num_kv_blocks": 1, "kv_cache_memory_bytes": 1}, "--num-kv-blocks and --kv-cache-memory-bytes exclude each other"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**values)
    assert str(caught.value) == message


def test_the_cost_model_is_read_from_words() -> None:
    parsed = SimulatedConfig.parse(["step_ms=0", "ctx_ns=1e2", "fault=die_at_step=3@rank=1"])
    assert parsed == SimulatedConfig(step_ms=0.0, ctx_ns=100.0, fault="die_at_step=3@rank=1")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("step_ms", "KEY=VALUE with KEY one of step_ms, prefill_us, seq_us, ctx_ns, fault, got 'step_ms'"),
        ("steps=1", "KEY=VALUE with KEY one of step_ms, prefill_us, seq_us, ctx_ns, fault, got 'steps=1'"),
        ("step_ms=fast", "--simulated step_ms must be a number of at least 0, got 'fast'"),
        ("step_ms=-1", "--simulated step_ms must be a number of at least 0, got '-1'"),
        ("seq_us=nan", "--simulated seq_us must be a number of at least 0, got 'nan'"),
        ("seq_us=inf", "--simulated seq_us must be a number of at least 0, got 'inf'"),
    ],
)
def test_a_word_that_is_no_cost_is_named(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SimulatedConfig.parse([word])
    assert message in str(caught.value)
