"""Configuration of one engine core, and how any configuration crosses to a child process: as plain JSON values.

Field metadata (`help`, `unit`, `choices`) is what the command line shows: a default and its explanation live here once.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import json
import os
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

DEFAULT_BLOCK_SIZE = 16


class ConfigError(ValueError):
    """A setting that cannot be used. The message names the setting, the value and what is allowed."""


def opt(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field with its explanation."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """Cost model of the simulated engine.

    step = step_ms + prefill_us × prompt tokens computed + seq_us × sequences + ctx_ns × context tokens
    """

    step_ms: float = 5.0
    prefill_us: float = 20.0
    seq_us: float = 20.0
    ctx_ns: float = 0.0
    fault: str = ""  # scripted faults for tests: `cores.runner.faults` says which

    @classmethod
    def parse(cls, pairs: list[str]) -> Self:
        """From `KEY=VALUE` words. Raises `ConfigError`."""
        values: dict[str, Any] = {}
        names = [f.name for f in dataclasses.fields(cls)]
        for pair in pairs:
            key, sep, value = pair.partition("=")
            if not sep or key not in names:
                raise ConfigError(f"--simulated takes KEY=VALUE with KEY one of {', '.join(names)}, got {pair!r}")
            if key != "fault":
                try:
                    values[key] = float(value)
                except ValueError:
                    raise ConfigError(f"--simulated {key} must be a number of at least 0, got {value!r}") from None
                if not 0 <= values[key] < float("inf"):
                    raise ConfigError(f"--simulated {key} must be a number of at least 0, got {value!r}")
            else:
                values[key] = value
        return cls(**values)

    def step_s(self, num_prompt_tokens: int, num_seqs: int, num_context_tokens: int) -> float:
        """How long one step takes on the modelled machine. The context counts what the step itself adds to it."""
        return (
            self.step_ms * 1e-3
            + self.prefill_us * 1e-6 * num_prompt_tokens
            + self.seq_us * 1e-6 * num_seqs
            + self.ctx_ns * 1e-9 * num_context_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine core. None means: found out from the model or the machine when the engine starts."""

    model: str = opt("", "Hugging Face style directory, or a name that `gateway models` knows")
    engine: Literal["torch", "simulated", "vllm"] = opt("torch", "what runs inside a core")
    runner: Literal["auto", "generate", "pooling"] = opt("auto", "text or embeddings; auto: what the model was made for")
    simulated: SimulatedConfig = field(
        default_factory=SimulatedConfig,
        metadata={"help": "cost model of the simulated engine; and fault=SCRIPT, what shall go wrong (docs/tuning.md)"},
    )
    vllm_args: tuple[str, ...] = opt(
        (), "engine arguments of vLLM that have no flag here, as its EngineArgs names them (--engine vllm)", metavar="KEY=VALUE"
    )
    device: Literal["auto", "cpu", "cuda"] = opt("auto", "where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = opt(
        "auto",
        "of weights and KV cache; auto: the model's own",
        spellings={"half": "float16", "float": "float32"},
    )
    max_model_len: int | None = opt(None, "longest prompt + output, in tokens; default: the model's own", min=1, suffixes=True)
    max_num_seqs: int = opt(256, "most sequences in one step", min=1)
    max_num_batched_tokens: int = opt(2048, "token budget of one step, prefill and decode together", min=1, suffixes=True)
    block_size: int | None = opt(
        None, "tokens per KV cache block; default: 16, or on a GPU what its attention kernel asks for", min=1
    )
    num_kv_blocks: int | None = opt(
        None, "size of the KV cache in blocks; default: from the memory", min=1, aliases=("--num-gpu-blocks-override",)
    )
    kv_cache_memory_bytes: int | None = opt(
        None, "size of the KV cache in bytes; default: from the memory", min=1, suffixes=True
    )
    gpu_memory_utilization: float | None = opt(
        None,
        "share of a GPU's memory for weights, KV cache and steps together, where no size of the cache is given; default: nine"
        " tenths of what is free once the weights are there",
        min=0.01,
        max=1,
        aliases=("--device-memory-utilization",),
    )
    enable_prefix_caching: bool = opt(True, "reuse the KV cache of equal prompt prefixes")
    scheduling_policy: Literal["fcfs", "priority"] = opt("fcfs", "order of waiting requests inside an engine")
    seed: int = opt(0, "of the weights of a randomly initialised model; requests have their own")
    enable_lora: bool = opt(False, "serve LoRA adapters beside the model")
    max_loras: int = opt(4, "different adapters in one step; so many stay resident", min=1)
    max_lora_rank: int = opt(16, "highest rank of an adapter; memory for so much is set aside", min=1, max=512)
    lora_modules: tuple[str, ...] = opt(
        (), "adapters to load at the start, served as models of these names", metavar="NAME=PATH"
    )
    profile_dir: str | None = opt(None, "directory for the traces of start_profile; default: no profiling")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("--lora-modules needs --enable-lora")
        parse_lora_modules(self.lora_modules)
        self._check_vllm()
        if self.profile_dir is not None:  # engines may run with another working directory than the user's
            object.__setattr__(self, "profile_dir", os.path.abspath(self.profile_dir))
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError("--num-kv-blocks and --kv-cache-memory-bytes exclude each other")
        if self.gpu_memory_utilization is not None and (self.engine == "simulated" or self.device == "cpu"):
            where = "--engine simulated" if self.engine == "simulated" else "--device cpu"
            raise ConfigError(f"--gpu-memory-utilization is for GPUs; with {where} use --num-kv-blocks")

    def _check_vllm(self) -> None:
        if self.vllm_args and self.engine != "vllm":
            raise ConfigError(f"--vllm-args needs --engine vllm, got --engine {self.engine}")
        if self.engine != "vllm":
            return
        if self.runner == "pooling":
            raise ConfigError("--runner pooling: --engine vllm serves text only, use --engine torch")
        if self.enable_lora:
            raise ConfigError("--enable-lora: --engine vllm serves no adapters, use --engine torch")


def _lora_words(word: str) -> tuple[str, str, str]:
    """Name, `=` and path; or vLLM's other spelling, an object that has them."""
    if not word.startswith("{"):
        return word.partition("=")
    try:
        module = json.loads(word)
        return str(module["name"]), "=", str(module["path"])
    except (ValueError, KeyError):
        raise ConfigError(f'--lora-modules takes NAME=PATH or {{"name": …, "path": …}}, got {word!r}') from None


def parse_lora_modules(words: tuple[str, ...]) -> dict[str, str]:
    """Paths by name, from `NAME=PATH` words. Raises `ConfigError`."""
    paths: dict[str, str] = {}
    for word in words:
        name, _, path = _lora_words(word)
        if not name or not path:
            raise ConfigError(f"--lora-modules takes NAME=PATH, got {word!r}")
        if name in paths:
            raise ConfigError(f"--lora-modules names {name!r} twice")
        paths[name] = path
    return paths


def check_fields(config: Any) -> None:
    """Checks each field against its hint's choices and its metadata's `min` and `max`. Raises `ConfigError`."""
    hints = get_type_hints(type(config))
    for f in dataclasses.fields(config):
        value, flag = getattr(config, f.name), "--" + f.name.replace("_", "-")
        choices = get_args(hints[f.name]) if get_origin(hints[f.name]) is Literal else f.metadata.get("choices")
        if choices and value is not None and value not in choices:
            raise ConfigError(f"{flag} must be one of {', '.join(map(str, choices))}, got {value!r}")
        low, high = f.metadata.get("min"), f.metadata.get("max")
        if value is not None and low is not None and not value >= low:
            raise ConfigError(f"{flag} must be at least {low}, got {value!r}")
        if value is not None and high is not None and not value <= high:
            raise ConfigError(f"{flag} must be at most {high}, got {value!r}")


def to_plain(config: Any) -> dict[str, Any]:
    """A (nested) config dataclass as JSON-able values."""
    return dataclasses.asdict(config)


def from_plain(cls: type[T], values: dict[str, Any]) -> T:
    """The inverse of `to_plain`. Raises `ConfigError` for an unknown key, naming the nearest known one."""
    hints = get_type_hints(cls)
    unknown = [key for key in values if key not in hints]
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}{did_you_mean(unknown[0], hints)}")
    return cls(**{key: _from_plain_value(hints[key], value) for key, value in values.items()})


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name; empty when there is nothing near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def is_loopback(host: str) -> bool:
    """Nobody on another machine can reach it. Other names than localhost are not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or ZMQ's `*`
        return host == "localhost"


def _from_plain_value(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    if get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = [a for a in get_args(hint) if a is not type(None)]
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast(type, hint), value)
    if get_origin(hint) is tuple:
        item_hint = get_args(hint)[0]
        return tuple(_from_plain_value(item_hint, item) for item in value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How the processes of one endpoint reach each other: by Unix sockets in a private directory, or over tcp with CURVE."""

    host: str | None = None  # the address that they listen on, each at a port of its own; None: Unix sockets
    curve_secret: str | None = field(default=None, repr=False)  # Z85; with a host, and all of them share it

    def address(self, directory: str, name: str) -> str:
        """The ZMQ address to bind for the socket of that name."""
        if self.host is None:
            return f"ipc://{os.path.join(directory, name)}"
        return f"tcp://{bracketed(self.host)}:0"  # bound and read back: a port that was looked for first may be taken by then


UNIX_SOCKETS = Transport()


def bracketed(host: str) -> str:
    """As it stands before a port."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndAddress:
    """Where a front end listens: its ROUTER takes the engine's DEALER, its PULL the engine's PUSH."""

    index: int
    input_address: str
    output_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """All that one engine core process is told at its start."""

    rank: int
    epoch: int
    local_rank: int
    config: EngineConfig
    control_address: str  # the launcher's ROUTER
    front_ends: tuple[FrontEndAddress, ...]
    num_threads: int | None = None  # of torch; None: torch's own choice
    log_level: str = "info"
    transport: Transport = UNIX_SOCKETS
    node: str = ""  # what it is called in `/status`; empty: by its host name
    log_format: str = "text"
