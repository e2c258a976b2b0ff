"""The kernels give what the formulas give, and a row's result depends on that row alone."""

from __future__ import annotations

import logging
import math
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cores.runner import cpu_kernels
from cores.runner.cpu_kernels import CpuKernels, load_cpu_kernels

BLOCK_SIZE = 16
BFLOAT16 = torch.bfloat16


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    loaded = load_cpu_kernels()
    if loaded is None:
        pytest.skip("this machine has no C compiler")
    return loaded


class Sequences:
    """K and V of some sequences, in blocks in any order; where no token is, there is NaN."""

    def __init__(self, lengths: list[int], *, kv_heads: int, group: int, head_dim: int, block_size: int = BLOCK_SIZE) -> None:
        self.lengths = torch.tensor(lengths)
        num_blocks = [-(-length // block_size) for length in lengths]
        self.keys, self.values = (
            torch.full((sum(num_blocks) + 1, block_size, kv_heads, head_dim), math.nan, dtype=BFLOAT16) for _ in range(2)
        )
        self.query = torch.randn(len(lengths), kv_heads * group, head_dim).to(BFLOAT16)
        order = iter((torch.randperm(sum(num_blocks)) + 1).tolist())
        self.tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int64)
        for row, (length, n) in enumerate(zip(lengths, num_blocks, strict=True)):
            self.tables[row, :n] = torch.tensor([next(order) for _ in range(n)])
            for states in (self.keys, self.values):
                for at, block in zip(range(0, length, block_size), self.tables[row].tolist(), strict=False):
                    states[block, : length - at] = torch.randn(min(block_size, length - at), kv_heads, head_dim).to(BFLOAT16)

    def of(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one sequence, each [length, kv_heads, head_dim]."""
        length = int(self.lengths[row])
        keys, values = (states[self.tables[row]].flatten(0, 1)[:length] for states in (self.keys, self.values))
        return keys, values

    def attend(self, kernels: CpuKernels, scale: float, rows: slice = slice(None)) -> torch.Tensor:
        return kernels.decode_attention(
            self.query[rows], self.keys, self.values, self.tables[rows].contiguous(), self.lengths[rows].contiguous(), scale
        )

    def exact(self, row: int, scale: float) -> torch.Tensor:
        keys, values = (states.double().repeat_interleave(self.query.shape[1] // states.shape[1], 1) for states in self.of(row))
        weights = (torch.einsum("hd,khd->hk", self.query[row].double(), keys) * scale).softmax(dim=-1)
        return torch.einsum("hk,khd->hd", weights, values)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (2, 8)], ids=lambda heads: f"{heads[0]}x{heads[1]}")
@pytest.mark.parametrize("lengths", [[1], [16, 17, 5], [1, 2, 15, 16, 31, 32, 33, 100, 7]], ids=len)
def test_attention_over_blocks_is_the_formula(
    kernels: CpuKernels, lengths: list[int], heads: tuple[int, int], head_dim: int
) -> None:
    torch.manual_seed(len(lengths) * head_dim)
    sequences = Sequences(lengths, kv_heads=heads[0], group=heads[1], head_dim=head_dim)
    found = sequences.attend(kernels, head_dim**-0.5)
    exact = torch.stack([sequences.exact(row, head_dim**-0.5) for row in range(len(lengths))])
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)  # one rounding to bfloat16


def test_a_sequence_gets_the_same_bits_alone_and_in_any_batch(kernels: CpuKernels) -> None:
    sequences = Sequences([1, 40, 16, 5, 33, 100, 7, 64, 80, 3], kv_heads=3, group=3, head_dim=64)
    together = sequences.attend(kernels, 0.125)
    for row in range(10):
        assert torch.equal(sequences.attend(kernels, 0.125, slice(row, row + 1))[0], together[row])


def test_blocks_of_more_than_one_tile(kernels: CpuKernels) -> None:
    sequences = Sequences([1, 31, 32, 70, 64], kv_heads=2, group=2, head_dim=32, block_size=32)
    exact = torch.stack([sequences.exact(row, 0.2) for row in range(5)])
    torch.testing.assert_close(sequences.attend(kernels, 0.2).double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 5.0, 300.0])
def test_flat_and_steep_scores(kernels: CpuKernels, scale: float) -> None:
    """Up to a softmax that is one token's, with all others far below what float32 can hold beside it."""
    sequences = Sequences([50, 3], kv_heads=1, group=4, head_dim=32)
    exact = torch.stack([sequences.exact(row, scale) for row in range(2)])
    torch.testing.assert_close(sequences.attend(kernels, scale).double(), exact, rtol=2**-7, atol=1e-4)


def test_a_sequences_nan_is_its_own(kernels: CpuKernels) -> None:
    sequences = Sequences([40, 40, 40], kv_heads=1, group=2, head_dim=32)
    before = sequences.attend(kernels, 0.2)
    sequences.keys[sequences.tables[1, 0], 3] = math.nan
    after = sequences.attend(kernels, 0.2)
    assert after[1].isnan().all()
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_queries_may_lie_between_other_states(kernels: CpuKernels) -> None:
    sequences = Sequences([20, 9], kv_heads=2, group=2, head_dim=32)
    found = sequences.attend(kernels, 0.2)
    row = torch.randn(2, 8, 32).to(BFLOAT16)  # query, key and value of a token side by side
    row[:, :4] = sequences.query
    sequences.query = row[:, :4]
    assert torch.equal(sequences.attend(kernels, 0.2), found)
    sequences.query = row[:, :4].transpose(0, 1).contiguous().transpose(0, 1)  # heads apart
    assert torch.equal(sequences.attend(kernels, 0.2), found)


@pytest.mark.parametrize("shape", [(1, 576), (32, 576), (5, 3, 64), (7, 100)], ids=str)
def test_norm_is_the_formula(kernels: CpuKernels, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).to(BFLOAT16), torch.randn(shape[-1]).to(BFLOAT16)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5).double(), exact, rtol=2**-8, atol=1e-6)


def test_rotation_is_the_formula_and_leaves_other_heads_alone(kernels: CpuKernels) -> None:
    states = torch.randn(6, 5, 32).to(BFLOAT16)
    cos, sin = torch.randn(6, 1, 32).to(BFLOAT16), torch.randn(6, 1, 32).to(BFLOAT16)
    wide = states[:, :3].double()
    exact = wide * cos.double() + torch.cat((wide[..., 16:], wide[..., :16]), dim=-1) * sin.double()
    rotated = states.clone()
    kernels.rotate(rotated, 3, cos, sin)
    torch.testing.assert_close(rotated[:, :3].double(), exact, rtol=2**-8, atol=1e-2)
    assert torch.equal(rotated[:, 3:], states[:, 3:])


def test_results_are_rounded_as_torch_rounds(kernels: CpuKernels) -> None:
    """To the nearest, ties to even: every finite bfloat16 times numbers that give ties."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(BFLOAT16)
    finite = bits[bits.isfinite()][:65024].view(-1, 1, 32)
    for factor in (1.0, 1.0078125, 1.5, 0.5078125):
        cos, sin = torch.full_like(finite, factor), torch.zeros_like(finite)
        rotated = finite.clone()
        kernels.rotate(rotated, 1, cos, sin)
        assert torch.equal(rotated, (finite.float() * factor).to(BFLOAT16))


def test_what_c_would_read_wrongly_or_beyond_its_end_is_refused(kernels: CpuKernels) -> None:
    """A norm kept in float32, weights that sleep, a model that rotates a part of each head: torch's operations say no, too."""
    x = torch.randn(2, 64).to(BFLOAT16)
    with pytest.raises(TypeError, match="float32"):
        kernels.rms_norm(x, torch.ones(64), 1e-5)
    with pytest.raises(RuntimeError, match=r"\[0\] must be 64"):
        kernels.rms_norm(x, x.new_empty(0), 1e-5)
    states, half = torch.randn(2, 3, 64).to(BFLOAT16), torch.randn(2, 1, 32).to(BFLOAT16)
    with pytest.raises(RuntimeError, match=r"\[2, 1, 32\] must be 64"):
        kernels.rotate(states, 3, half, half)


@pytest.mark.parametrize("width", [64, 100, 577])
def test_norm_of_a_row_has_the_same_bits_in_any_batch_and_at_any_address(kernels: CpuKernels, width: int) -> None:
    x, weight = torch.randn(33, width).to(BFLOAT16), torch.randn(width).to(BFLOAT16)
    together = kernels.rms_norm(x, weight, 1e-5)
    for row in range(33):
        assert torch.equal(kernels.rms_norm(x[row : row + 1], weight, 1e-5)[0], together[row])


# --- compiling ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gateway" / "kernels"


def compiler(path: Path, script: str) -> list[str]:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return [str(path)]


def test_a_second_start_compiles_nothing(kernels: CpuKernels, cache: Path, tmp_path: Path) -> None:
    once = compiler(tmp_path / "once", f'[ "$1" = --version ] || echo compiled >> {tmp_path}/log; exec cc "$@"')
    assert cpu_kernels._compiled(once, cache) == cpu_kernels._compiled(once, cache)
    assert (tmp_path / "log").read_text() == "compiled\n"
    assert [path.suffix for path in cache.iterdir()] == [".so"]


@pytest.fixture
def quick(tmp_path: Path) -> list[str]:
    """A compiler whose libraries are a line of text."""
    script = 'case "$*" in *--version) exit;; esac; while [ "$1" != -o ]; do shift; done; echo made > "$2"'
    return compiler(tmp_path / "quick", script)


def test_other_arguments_of_the_compiler_make_another_file(quick: list[str], cache: Path) -> None:
    assert cpu_kernels._compiled(quick, cache) != cpu_kernels._compiled([*quick, "-g"], cache)


@pytest.mark.parametrize("rest", [b"", b"mad", b"made\n" + bytes(32)], ids=["empty", "half", "zeros"])
def test_a_damaged_file_is_compiled_again(quick: list[str], cache: Path, rest: bytes) -> None:
    path = cpu_kernels._compiled(quick, cache)
    whole = path.read_bytes()
    path.write_bytes(rest)
    assert cpu_kernels._compiled(quick, cache) == path
    assert path.read_bytes() == whole


def test_a_cache_that_other_users_may_write_is_not_run(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path / "cc", "exit 1")[0])
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert load_cpu_kernels.__wrapped__() is None
    assert f"{cache} belongs to another user, or others may write there" in caplog.text


def test_only_its_user_may_write_the_cache_whatever_the_umask(quick: list[str], cache: Path) -> None:
    before = os.umask(0)
    try:
        cpu_kernels._compiled(quick, cache)
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_ranks_that_start_together_all_find_a_whole_file(kernels: CpuKernels, cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        (path,) = set(pool.map(lambda _: cpu_kernels._compiled(["cc"], cache), range(4)))
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize(
    ("cc", "reason"),
    [
        ("no-such-compiler", "no C compiler (no-such-compiler)"),
        ("sh -c 'echo cannot >&2; exit 1'", "sh failed: cannot"),
        ("sh -c true", "No such file or directory"),
        ("cc '", "No closing quotation"),
    ],
    ids=["missing", "failing", "one that makes nothing", "a quote left open"],
)
def test_without_a_compiler_that_works_there_are_no_kernels_and_the_log_says_why(
    cc: str, reason: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", cc)
    with caplog.at_level(logging.INFO):
        assert load_cpu_kernels.__wrapped__() is None
    assert reason in caplog.text
    assert "torch's own operations serve" in caplog.text


def test_the_log_quotes_the_compilers_error_not_its_drawing(
    kernels: CpuKernels, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "cc -D__builtin_shuffle=unknown")  # as a compiler that has no such operation
    assert load_cpu_kernels.__wrapped__() is None
    assert "cc failed: " in caplog.text
    assert "error: " in caplog.text


def test_kernels_use_the_threads_that_torch_has(kernels: CpuKernels) -> None:
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(mapped) == 1
