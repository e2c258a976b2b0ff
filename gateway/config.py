"""Everything `gateway serve` can be told: small frozen structs, composed. Flags and YAML keys are made from these fields."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from cores.config import ConfigError, EngineConfig, check_fields, opt, parse_lora_modules
from gateway.parsers.choice import TOOL_CALL_PARSERS, marker_tokens
from gateway.parsers.reasoning import REASONING_PARSERS

__all__ = [
    "AdmissionConfig", "BalancerConfig", "ConfigError", "EngineConfig", "FaultConfig", "GatewayConfig",
    "ObservabilityConfig", "ParallelConfig", "ServerConfig",
]  # fmt: skip

DEFAULT_POLICY = "prefix_affinity"
MAX_RANKS = 1024


def json_object(flag: str, text: str) -> dict[str, Any]:
    """What a flag that takes JSON means. Raises `ConfigError`."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} takes a JSON object, got {text!r}")
    return value


def _listed(words: tuple[str, ...]) -> tuple[str, ...]:
    """vLLM writes a list as JSON in one word."""
    if len(words) != 1 or not words[0].startswith("["):
        return words
    try:
        return tuple(map(str, json.loads(words[0])))
    except ValueError:
        return words  # which is refused as what it is


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side."""

    host: str = opt("127.0.0.1", "address to listen on")
    port: int = opt(8000, "port to listen on; 0 picks one and prints it", min=0, max=65535)
    api_server_count: int = opt(1, "front-end processes sharing the port", min=1, max=64, aliases=("-asc",))
    uds: str | None = opt(None, "Unix socket to listen on instead of host and port")
    served_model_name: tuple[str, ...] = opt((), "names accepted in `model`; default: the directory's name")
    api_key: tuple[str, ...] = opt((), "bearer tokens; without any, no authentication; also GATEWAY_API_KEY")
    allowed_origins: tuple[str, ...] = opt(
        (), "web pages that may ask from a browser (CORS), as https://chat.example.com; * for all; default: none"
    )
    ssl_certfile: str | None = opt(None, "TLS certificate, PEM")
    ssl_keyfile: str | None = opt(None, "TLS key, PEM")
    chat_template: str | None = opt(None, "file with a Jinja chat template; default: the model's own")
    tool_call_parser: str | None = opt(
        None,
        f"how the model writes tool calls, which tool_choice auto needs: {', '.join(TOOL_CALL_PARSERS)}",
        choices=tuple(TOOL_CALL_PARSERS),
    )
    default_chat_template_kwargs: str | None = opt(
        None, "JSON object for the chat template, where a request's chat_template_kwargs do not say", json=True
    )
    generation_config: str = opt(
        "auto",
        "directory whose generation_config.json says how to sample where a request does not; auto: the model's own; vllm: none",
    )
    override_generation_config: str | None = opt(None, "JSON object whose values beat those of the file", json=True)
    enable_auto_tool_choice: bool | None = opt(None, "as in vLLM; --tool-call-parser alone does it")
    reasoning_parser: str | None = opt(
        None,
        f"how the model marks its reasoning, which answers then show apart: {', '.join(REASONING_PARSERS)}",
        choices=tuple(REASONING_PARSERS),
    )
    enable_force_include_usage: bool = opt(
        False, "every chunk of a stream says how many tokens there are, whether or not it was asked for: for proxies that count"
    )
    dev_mode: bool = opt(
        False, "add the development routes, with which a caller can stop the engines; also GATEWAY_SERVER_DEV_MODE"
    )
    shutdown_timeout: float = opt(30.0, "time to drain after SIGTERM; a second signal ends at once", unit="s", min=0)
    shutdown_delay: float = opt(
        0.0,
        "at the beginning of that time, serve new requests while /ready says no already: for balancers that probe",
        unit="s",
        min=0,
    )
    metrics_prefix: str = opt("gateway:", "of metric names; `vllm:` makes vLLM's dashboards work unchanged")

    def __post_init__(self) -> None:
        check_fields(self)
        # As of `--api-key "$UNSET"`: an empty key would let everybody in, an empty host listen on all addresses.
        for flag, texts in (
            ("--host", (self.host,)),
            ("--api-key", self.api_key),
            ("--served-model-name", self.served_model_name),
        ):
            if not all(text.strip() for text in texts):
                raise ConfigError(f"{flag} must not be empty")
        _ = self.chat_template_defaults, self.generation_config_override  # raise for what is no JSON
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError("--enable-auto-tool-choice needs --tool-call-parser")
        if self.enable_auto_tool_choice is False and self.tool_call_parser is not None:
            raise ConfigError("--no-enable-auto-tool-choice: --tool-call-parser is for tool_choice auto; leave both out")
        object.__setattr__(self, "allowed_origins", _listed(self.allowed_origins))
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ConfigError(f"--allowed-origins takes SCHEME://HOST[:PORT] without a path, or *, got {origin!r}")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together")
        if not re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?", self.metrics_prefix):
            raise ConfigError(
                f"--metrics-prefix must be letters, digits, `_` and `:`, no digit first, got {self.metrics_prefix!r}"
            )

    @property
    def chat_template_defaults(self) -> dict[str, Any]:
        return json_object("--default-chat-template-kwargs", self.default_chat_template_kwargs or "{}")

    @property
    def generation_config_override(self) -> dict[str, Any]:
        return json_object("--override-generation-config", self.override_generation_config or "{}")

    @property
    def marker_tokens(self) -> tuple[str, ...]:
        """What the parsers look for: text, even where the tokenizer calls it special."""
        return marker_tokens(self.tool_call_parser, self.reasoning_parser)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How many ranks there are, where, and which of them this endpoint serves."""

    data_parallel_size: int = opt(1, "engine cores (ranks) in the group", min=1, max=MAX_RANKS, aliases=("-dp",))
    data_parallel_size_local: int | None = opt(
        None, "ranks of this node, with hybrid or multi-port external load balancing; default: all", min=1, aliases=("-dpl",)
    )
    data_parallel_rank: int | None = opt(None, "this endpoint's rank (external load balancing)", min=0, aliases=("-dpn",))
    data_parallel_start_rank: int | None = opt(
        None,
        "the first rank of this node, with hybrid or multi-port external load balancing; default: 0",
        min=0,
        aliases=("-dpr",),
    )
    data_parallel_address: str = opt(
        "127.0.0.1",
        "address of the group's coordinator, started beside rank 0; where one endpoint has ranks on other nodes: its own",
        aliases=("-dpa",),
    )
    data_parallel_rpc_port: int = opt(29550, "port of the group's coordinator", min=1, max=65535, aliases=("-dpp",))
    data_parallel_key_file: str | None = opt(
        None,
        "file with a secret that all endpoints of a group share, for a coordinator that is not on a loopback address; also"
        " GATEWAY_DP_KEY_FILE",
    )
    data_parallel_external_lb: bool = opt(False, "a load balancer stands in front: one endpoint per rank", aliases=("-dpe",))
    data_parallel_multi_port_external_lb: bool = opt(
        False, "supervise one external-LB endpoint per rank, on ports port + i", aliases=("-dpm",)
    )
    data_parallel_hybrid_lb: bool = opt(False, "one endpoint per node, which balances over its own ranks", aliases=("-dph",))
    data_parallel_backend: Literal["ray", "mp"] = opt(
        "ray", "engine cores as Ray actors, or as plain local processes", aliases=("-dpb",)
    )
    data_parallel_transport: Literal["auto", "ipc", "tcp"] = opt(
        "auto",
        "how ranks and front ends reach each other: ipc needs them on one node, tcp spreads ranks over a Ray cluster's nodes,"
        " with CURVE; auto: tcp in a cluster that was joined with --ray-address, if this endpoint has all ranks",
    )
    ray_address: str | None = opt(None, "Ray cluster to join, or `local`; default: RAY_ADDRESS, else an embedded one")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ray_address == "local":  # Ray's word for a cluster of one's own
            object.__setattr__(self, "ray_address", None)
        if self.data_parallel_rank is not None and self.data_parallel_rank >= self.data_parallel_size:
            raise ConfigError(
                f"--data-parallel-rank must be below --data-parallel-size ({self.data_parallel_size}),"
                f" got {self.data_parallel_rank}"
            )
        if self.data_parallel_external_lb and self.data_parallel_rank is None:
            raise ConfigError("--data-parallel-external-lb needs --data-parallel-rank: each endpoint serves one rank")
        if self.data_parallel_rank is not None and not self.data_parallel_external_lb:
            raise ConfigError("--data-parallel-rank needs --data-parallel-external-lb")
        modes = self._modes()
        if len(modes) > 1:
            raise ConfigError(f"{modes[0]} and {modes[1]} exclude each other")
        size, num_local, start = self.data_parallel_size, self.data_parallel_size_local, self.data_parallel_start_rank
        if not modes and (start is not None or num_local not in (None, size)):
            name = "--data-parallel-size-local" if start is None else "--data-parallel-start-rank"
            raise ConfigError(f"{name} needs --data-parallel-hybrid-lb or one of the external modes")
        if (start or 0) + (num_local or 1) > size:
            raise ConfigError(
                f"--data-parallel-start-rank plus --data-parallel-size-local must be at most --data-parallel-size ({size}),"
                f" got {start or 0} and {num_local or 1}"
            )

    def _modes(self) -> list[str]:
        """Those of several endpoints that were asked for."""
        return [
            "--" + name.replace("_", "-")
            for name in ("data_parallel_external_lb", "data_parallel_multi_port_external_lb", "data_parallel_hybrid_lb")
            if getattr(self, name)
        ]

    @property
    def is_external(self) -> bool:
        """This endpoint is one of several, and sends to its own rank only."""
        return self.data_parallel_external_lb and self.data_parallel_size > 1

    @property
    def has_others(self) -> bool:
        """The group has ranks behind other endpoints."""
        return len(self.ranks) < self.data_parallel_size

    @property
    def is_part_of_group(self) -> bool:
        """What this command starts speaks to a coordinator, or is it."""
        return self.has_others or self.data_parallel_multi_port_external_lb

    @property
    def ranks_of_node(self) -> tuple[int, ...]:
        """The ranks of all endpoints that were started together on this node."""
        start = self.data_parallel_start_rank or 0
        return tuple(range(start, start + (self.data_parallel_size_local or self.data_parallel_size - start)))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that this endpoint launches and serves."""
        if self.data_parallel_rank is not None:
            return (self.data_parallel_rank,)
        return self.ranks_of_node


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerConfig:
    load_balancing_policy: str = opt(DEFAULT_POLICY, "how a rank is chosen")
    dispatch: Literal["early", "late"] = opt(
        "early", "bind a request to a rank when it comes, or when the rank has room for it"
    )
    dispatch_order: Literal["fcfs", "shortest", "fair"] = opt("fcfs", "of requests that wait for a rank, with --dispatch late")

    def __post_init__(self) -> None:
        from balancer.policies import POLICIES

        check_fields(self)
        if self.dispatch == "early" and self.dispatch_order != "fcfs":
            raise ConfigError(f"--dispatch-order {self.dispatch_order} needs --dispatch late: else requests wait in the ranks")
        if self.load_balancing_policy not in POLICIES:
            raise ConfigError(
                f"--load-balancing-policy must be one of {', '.join(POLICIES)}, got {self.load_balancing_policy!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    failover: bool = opt(True, "requests of a dead rank go on at another one, or wait for its restart")
    engine_restarts: int = opt(3, "restarts of a dead rank within ten minutes before it is given up", min=0)
    stall_timeout: float = opt(60.0, "a rank with work and no step for this long is killed and replaced", unit="s", min=0.1)
    engine_ready_timeout: float = opt(
        600.0, "bound on the start of a rank; also GATEWAY_ENGINE_READY_TIMEOUT_S", unit="s", min=1
    )
    keep_alive_on_engine_death: bool = opt(
        False, "keep the server up when no rank is left; also GATEWAY_KEEP_ALIVE_ON_ENGINE_DEATH"
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    max_num_queued_requests: int | None = opt(
        None, "requests waiting or running above which new ones get 503", min=0, aliases=("--max-num-queued-reqs",)
    )
    max_num_queued_tokens: int | None = opt(None, "prompt tokens not yet computed above which new requests get 503", min=0)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    disable_log_stats: bool = opt(False, "no statistics: no line in the log every 10 s, no histograms in /metrics")
    enable_log_requests: bool = opt(False, "two lines in the log per request; with --log-level debug also its prompt")
    max_log_len: int | None = opt(None, "characters or token ids of a prompt that are logged; default: all", min=0)
    otlp_traces_endpoint: str | None = opt(
        None, "OTLP collector (HTTP) that gets a trace per request, like http://127.0.0.1:4318/v1/traces"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        url = self.otlp_traces_endpoint
        if url is not None and not url.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-traces-endpoint must be an http:// or https:// URL, got {url!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    balancer: BalancerConfig = field(default_factory=BalancerConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    output_chunk_size: int = opt(128, "outputs handled before the loop gets a turn; also GATEWAY_OUTPUT_PROC_CHUNK_SIZE", min=1)
    log_level: Literal["debug", "info", "warning", "error"] = opt(
        "info", "of the log on stderr", spellings={name.upper(): name for name in ("debug", "info", "warning", "error")}
    )
    log_format: Literal["text", "json"] = opt("text", "of the log on stderr: json is an object on each line")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.balancer.dispatch == "late" and len(self.parallel.ranks) == 1:
            raise ConfigError("--dispatch late needs several ranks behind this endpoint (--data-parallel-size of 2 or more)")
        if taken := parse_lora_modules(self.engine.lora_modules).keys() & set(self.server.served_model_name):
            raise ConfigError(f"--lora-modules: {min(taken)!r} is a name of the model itself (--served-model-name)")
