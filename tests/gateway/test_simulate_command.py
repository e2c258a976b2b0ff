"""`gateway simulate` from the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.cli import main
from tests.balancer.simulation.workload import chats


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows = (
        {
            "timestamp": 1e3 * r.arrival_s,
            "input_length": r.num_prompt_tokens,
            "output_length": r.num_output_tokens,
            "hash_ids": r.hash_ids,
        }
        for r in chats(60)
    )
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def simulate(*words: object) -> int:
    return main(["simulate", *map(str, words)])


def test_json_has_one_object_for_each_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        simulate("--trace", trace, "--ranks", 2, "--policy", "round_robin", "vllm", "--load", 0.8, "--seed", 3, "--json") == 0
    )
    first, second = json.loads(capsys.readouterr().out)
    assert [first["policy"], second["policy"]] == ["round_robin", "vllm"]
    for summary in (first, second):
        assert summary["requests"] == 60
        for key in ("ttft_ms", "queue_delay_ms", "itl_ms", "e2e_ms"):
            assert set(summary[key]) == {"mean", "p50", "p90", "p99"}
        assert {"prefix_hit_rate", "imbalance", "wall_s"} <= set(summary)


def test_without_a_policy_it_is_the_default_of_serve(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gateway.config import DEFAULT_POLICY

    assert simulate("--trace", trace, "--ranks", 2) == 0
    load, *table = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"60 requests within [\d.]+ s \([\d.]+ a second\) for 2 ranks; --json has all figures", load)
    assert table[2].startswith(DEFAULT_POLICY)


def test_the_default_engine_is_the_documented_one(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documented = ("--simulated", "step_ms=8", "prefill_us=50", "seq_us=50", "ctx_ns=30", "--max-num-batched-tokens", 8192)
    documented += ("--max-num-seqs", 256, "--num-kv-blocks", 500_000 // 512)
    summaries = []
    for flags in ((), documented):
        assert simulate("--trace", trace, "--ranks", 2, "--json", *flags) == 0
        (summary,) = json.loads(capsys.readouterr().out)
        del summary["wall_s"]
        summaries.append(summary)
    assert summaries[0] == summaries[1]


def test_faults_and_front_ends_are_simulated(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--front-ends", 2, "--kill", "0@1+2", "--slow", "1@0.5:2", "--rolling-restart", 6, "--report-interval-ms", 50)
    assert simulate("--trace", trace, "--ranks", 3, *words, "--json") == 0
    (summary,) = json.loads(capsys.readouterr().out)
    assert summary["moved"] > 0
    assert summary["failed"] == 0


def test_the_same_seed_prints_the_same(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for _ in range(2):
        assert simulate("--trace", trace, "--ranks", 2, "--policy", "random", "--seed", 5, "--json") == 0
        (summary,) = json.loads(capsys.readouterr().out)
        del summary["wall_s"]
        outputs.append(summary)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--policy", "best"), "unknown policy 'best'; one of "),
        (("--kill", "7@1"), "a fault of rank 7: the ranks are 0 to 1"),
        (("--num-kv-blocks", "2"), "do not hold a request of"),
        (("--simulated", "step=3"), "--simulated takes KEY=VALUE"),
        (("--dispatch-order", "shortest"), "needs --dispatch late"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(
    words: tuple[str, ...], message: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate("--trace", trace, "--ranks", 2, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", "0"), "from 1 to 1024, got '0'"),
        (("--load", "0"), "must be a number above 0, got '0'"),
        (("--kill", "x"), "must be RANK@SECONDS"),
        (("--slow", "1@2"), "must be RANK@SECONDS:FACTOR"),
    ],
)
def test_bad_flags_are_one_line(words: tuple[str, ...], message: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        simulate("--trace", trace, "--ranks", 2, *words)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--trace", tmp_path / "none", "--ranks", 2) == 2
    assert "cannot read the trace" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("serve", "--help"), ("simulate", "--ranks", "2", "--trace")])
def test_a_reader_that_has_left_ends_a_command_without_a_traceback(words: tuple[str, ...], trace: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-m", "gateway", *words, *([str(trace)] if words[-1] == "--trace" else [])]
    done = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode in (0, 141)  # argparse of some Pythons takes no notice
