"""Compiles, loads and calls `cpu_kernels.c`. Without a C compiler there are no kernels, and torch's operations serve.

Theory of operation
-------------------
torch needs two operations to copy K and V out of their blocks before it can look at them, seven for an RMS norm, five for a
rotation. A decode step of 32 sequences of SmolLM2 takes 55 ms with these, and 45 ms with the kernels (two cores).

The compiled file is kept in the user's cache, named after everything that it was made of: a second start compiles nothing, and
a home directory shared by different machines holds one file for each. It is made under another name and moved to its own, so
ranks that start at the same time all find a whole one. Its last bytes are a digest of the rest: what a full disk or a power
failure left of it is compiled again, where running it would end the process. A directory that other users may write is refused.

Its OpenMP threads are torch's: torch is loaded first, and the loader takes the `libgomp.so.1` that is there already. A second
pool would fight torch's for the cores.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import torch

from cores.user_cache import user_cache

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    # What no result depends on. Not -ffast-math: linked with it, a library changes the rounding of the whole process.
    *("-fno-math-errno", "-fno-trapping-math"),
)
COMPILER_TIMEOUT_S = 60.0  # it takes one second

# As in the source.
TILE, PAIR, MAX_HEAD_DIM = 16, 32, 256

DIGEST_BYTES = hashlib.sha256().digest_size

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "decode_attention": (*[_POINTER] * 2, _INT, *[_POINTER] * 3, _INT, _POINTER, *[_INT] * 5, _FLOAT),
    "rms_norm": (*[_POINTER] * 3, *[_INT] * 2, _FLOAT),
    "rotate": (_POINTER, _INT, *[_POINTER] * 2, *[_INT] * 3),
}


class CpuKernels:
    """All tensors are bfloat16, but tables and lengths, which are int64 and contiguous; and on the CPU.

    What torch's operations would refuse is refused here too: C would read beyond the end, or take bits for what they are not.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self._library = library

    @staticmethod
    def can_attend(*, head_dim: int, block_size: int) -> bool:
        return head_dim <= MAX_HEAD_DIM and head_dim % PAIR == 0 and block_size % TILE == 0

    def decode_attention(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """[n, heads, head_dim] for `query` of that shape, `keys` and `values` [blocks, block_size, kv_heads, head_dim],
        `tables` [n, blocks of the longest] and `lengths` [n] in tokens, at least 1."""
        num_seqs, num_heads, head_dim = query.shape
        block_size, num_kv_heads = keys.shape[1], keys.shape[2]
        _need_bfloat16(query, keys, values)
        if query.stride(1) != head_dim or query.stride(2) != 1:
            query = query.contiguous()
        out = torch.empty((num_seqs, num_heads, head_dim), dtype=torch.bfloat16)
        self._library.decode_attention(
            *(out.data_ptr(), query.data_ptr(), query.stride(0), keys.data_ptr(), values.data_ptr()),
            *(tables.data_ptr(), tables.shape[1], lengths.data_ptr(), num_seqs),
            *(block_size, num_kv_heads, num_heads // num_kv_heads, head_dim, scaling),
        )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) × weight over the last dimension, whose size `weight` has."""
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        _need_bfloat16(x, weight)
        _need_size(weight, width)
        self._library.rms_norm(out.data_ptr(), x.data_ptr(), weight.data_ptr(), x.numel() // width, width, eps)
        return out

    def rotate(self, states: torch.Tensor, num_heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """The first heads of `states` [T, heads, head_dim], in place: x × cos + swapped × sin, the halves of each swapped.
        `cos` and `sin` [T, 1, head_dim], `sin` with the sign that its half needs."""
        num_rows, _, head_dim = states.shape
        _need_bfloat16(states, cos, sin)
        _need_size(cos, head_dim)
        _need_size(sin, head_dim)
        self._library.rotate(
            *(states.data_ptr(), states.stride(0), cos.data_ptr(), sin.data_ptr()), *(num_rows, num_heads, head_dim)
        )


def _need_bfloat16(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype is not torch.bfloat16:
            raise TypeError(f"kernels for this CPU compute in bfloat16, not in {tensor.dtype}")


def _need_size(tensor: torch.Tensor, size: int) -> None:
    if tensor.shape[-1] != size:
        raise RuntimeError(f"the last dimension of {list(tensor.shape)} must be {size}")


@functools.cache
def load_cpu_kernels() -> CpuKernels | None:
    """None, and the reason in the log, where they cannot be compiled."""
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
        if shutil.which(compiler[0]) is None:
            logger.info("no C compiler (%s): on this CPU, torch's own operations serve, which are slower", compiler[0])
            return None
        return CpuKernels(ctypes.CDLL(str(_compiled(compiler, user_cache() / "kernels"))))
    # RuntimeError: nobody has a home directory; ValueError: $CC with one quote
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        logger.warning("kernels for this CPU: %s; torch's own operations serve, which are slower", _reason(error))
        return None


def _compiled(compiler: list[str], directory: Path) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_what_others_may_write(directory)
    path = directory / f"cpu-kernels-{_fingerprint(compiler)}.so"
    if _is_whole(path):
        return path
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        made = Path(scratch) / path.name
        _run([*compiler, *FLAGS, str(SOURCE), "-o", str(made), "-lm"])
        made.write_bytes(_with_digest(made.read_bytes()))
        os.replace(made, path)
    return path


def _refuse_what_others_may_write(directory: Path) -> None:
    """What lies there becomes part of this process."""
    status = directory.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{directory} belongs to another user, or others may write there")


def _is_whole(path: Path) -> bool:
    if not path.exists():
        return False
    content = path.read_bytes()
    return content == _with_digest(content[:-DIGEST_BYTES])


def _with_digest(content: bytes) -> bytes:
    return content + hashlib.sha256(content).digest()  # the loader does not look behind the last section


def _fingerprint(compiler: list[str]) -> str:
    version = _run([*compiler, "--version"])
    parts = (SOURCE.read_text("utf-8"), *FLAGS, *compiler, version, platform.machine(), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _run(command: list[str]) -> str:
    """Its output. In English, which `_reason` reads; stdin is the engine's own."""
    done = subprocess.run(
        command,
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=COMPILER_TIMEOUT_S,
        env={**os.environ, "LC_ALL": "C"},
    )
    return done.stdout


def _processor() -> str:
    """What `-march=native` depends on."""
    lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))))


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError) and error.stderr.strip():
        lines = error.stderr.strip().splitlines()  # GCC's last one is a drawing of where it stopped
        told = (line for line in lines if "error:" in line or "ld:" in line)
        return f"{error.cmd[0]} failed: {next(told, lines[-1])}"
    return str(error)
