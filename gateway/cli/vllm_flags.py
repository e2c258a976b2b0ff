"""vLLM's flags that are no settings here: which may be said all the same, and what the others are answered with.

One may be said where it asks for what happens anyway. Every other one is refused with the reason and what to do instead: a flag
that is taken and changes nothing would be found out by its results.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cores.config import ConfigError

_ONE_DEVICE = "a rank is one process with one device; use --data-parallel-size for more devices"
_MULTIMODAL = "models here take text only; leave it out"
_ENGINES = "--engine vllm takes it as --vllm-args; leave it out otherwise"
_NODES = (
    "ranks on other nodes come with --ray-address, or one endpoint per node with --data-parallel-hybrid-lb and"
    " --data-parallel-start-rank"
)


@dataclass(frozen=True, slots=True)
class Harmless:
    """Asks for what happens anyway: with one of these values, or (none) as a switch that is on. `why` is against any other."""

    why: str
    values: tuple[str, ...] = ()
    short: str | None = None


HARMLESS = {
    "tensor-parallel-size": Harmless(_ONE_DEVICE, ("1",), "-tp"),
    "pipeline-parallel-size": Harmless(_ONE_DEVICE, ("1",), "-pp"),
    "decode-context-parallel-size": Harmless(_ONE_DEVICE, ("1",), "-dcp"),
    "nnodes": Harmless(_NODES, ("1",)),
    "node-rank": Harmless(_NODES, ("0",)),
    "enable-chunked-prefill": Harmless("prompts are always computed in pieces of --max-num-batched-tokens; leave it out"),
    "trust-remote-code": Harmless("no code from a model's directory is run; leave it out"),
    "disable-log-requests": Harmless("--enable-log-requests says that"),
    "disable-uvicorn-access-log": Harmless("there is no access log; --enable-log-requests is the nearest; leave it out"),
    "disable-fastapi-docs": Harmless("there are no such pages; leave it out"),
    "enable-prompt-tokens-details": Harmless("usage always has prompt_tokens_details; leave it out"),
    "enable-request-id-headers": Harmless("answers always have X-Request-Id; leave it out"),
    "enable-server-load-tracking": Harmless("/load always counts; leave it out"),
    "enable-sleep-mode": Harmless("ranks can always sleep, the routes come with --dev-mode; leave it out"),
    "max-logprobs": Harmless("the most is 20", ("20",)),
    "load-format": Harmless("weights are safetensors; leave it out", ("auto", "safetensors")),
    "tokenizer-mode": Harmless("tokenizers are tokenizer.json files; leave it out", ("auto", "hf")),
    "kv-cache-dtype": Harmless("the KV cache has the --dtype of the model; leave it out", ("auto",)),
    "chat-template-content-format": Harmless("templates get content as text; leave it out", ("auto", "string")),
    "response-role": Harmless("answers are the assistant's; leave it out", ("assistant",)),
    "stream-interval": Harmless("tokens are sent as they come; leave it out", ("1",)),
}

# Why not, and which flags it is said of.
_REFUSED = (
    (_ONE_DEVICE, "prefill-context-parallel-size enable-expert-parallel enable-eplb enable-dbo all2all-backend"),
    (_NODES, "headless master-addr master-port"),
    (_MULTIMODAL, "limit-mm-per-prompt mm-processor-kwargs mm-processor-cache-gb media-io-kwargs allowed-local-media-path"),
    (_MULTIMODAL, "allowed-media-domains language-model-only skip-mm-profiling mm-encoder-tp-mode"),
    ("--data-parallel-backend says how engine cores are run", "distributed-executor-backend worker-use-ray engine-use-ray"),
    ("quantized weights are not supported; give a directory with float weights", "quantization quantization-config"),
    (
        "--engine vllm takes it as --vllm-args; --engine torch has no such mode, leave it out",
        "enforce-eager compilation-config",
    ),
    (_ENGINES, "attention-backend async-scheduling cpu-offload-gb"),
    (_ENGINES, "max-num-scheduled-tokens optimization-level"),
    (_ENGINES, "hf-overrides logits-processors model-impl"),
    (_ENGINES, "additional-config attention-config kernel-config config-format hf-config-path model-loader-extra-config"),
    (
        _ENGINES,
        "cudagraph-capture-sizes max-cudagraph-capture-size moe-backend linear-backend mamba-cache-dtype performance-mode",
    ),
    (_ENGINES, "disable-cascade-attn disable-hybrid-kv-cache-manager disable-sliding-window enable-flashinfer-autotune"),
    (_ENGINES, "long-prefill-token-threshold max-num-partial-prefills safetensors-load-strategy scheduler-cls worker-cls"),
    (_ENGINES, "worker-extension-cls ignore-patterns mamba-block-size mamba-ssm-cache-dtype numa-bind offload-backend"),
    ("/scale_elastic_ep works without it; leave it out", "enable-elastic-ep elastic-ep-max-dp-size"),
    ("there is HTTP only", "grpc grpc-port"),
    ("there is no such route or page; leave it out", "enable-tokenizer-info-endpoint enable-offline-docs enable-scale-out"),
    ("there is no KV transfer and no separate prefill", "kv-transfer-config kv-offloading-size kv-offloading-backend"),
    ("the balancer reads the engines' caches without it; leave it out", "kv-events-config prefix-caching-hash-algo"),
    ("there is no speculative decoding; leave it out", "speculative-config spec-method spec-model spec-tokens"),
    ("MODEL's directory holds its tokenizer: put the other one's files there", "tokenizer"),
    ("MODEL is a directory, or a name of `gateway models`; fetch the revision first", "revision tokenizer-revision"),
    ("MODEL is a directory, or a name of `gateway models`; fetch it first", "code-revision download-dir hf-token"),
    ("--log-level says that", "uvicorn-log-level"),
    ("there is no access log; leave it out", "disable-access-log-for-endpoints"),
    ("--log-level and --log-format say that", "log-config-file logging-config"),
    ("routes are at the root: let the proxy take the prefix away", "root-path"),
    ("--allowed-origins is enough: methods and headers of the API are allowed", "allowed-methods allowed-headers"),
    ("keys are sent as a header, no cookies; leave it out", "allow-credentials"),
    ("let the proxy in front do that", "middleware ssl-ca-certs ssl-cert-reqs ssl-ciphers enable-ssl-refresh"),
    ("say it in the request", "return-tokens-as-token-ids"),
    ("parsers are those of --tool-call-parser and --reasoning-parser", "tool-parser-plugin reasoning-parser-plugin"),
    ("parsers are those of --tool-call-parser", "tool-server"),
    ("--reasoning-parser says that", "enable-reasoning"),
    ("grammars are always llguidance's; leave it out", "structured-outputs-config guided-decoding-backend reasoning-config"),
    ("--runner says that", "task convert pooler-config"),
    ("vLLM has no such flag any more; leave it out", "swap-space num-scheduler-steps use-v2-block-manager preemption-mode"),
    ("vLLM has no such flag any more; leave it out", "max-seq-len-to-capture disable-frontend-multiprocessing"),
    ("--max-loras says how many stay resident", "max-cpu-loras"),
    ("adapters have the --dtype of the model; leave it out", "lora-dtype fully-sharded-loras lora-extra-vocab-size"),
    ("/v1/load_lora_adapter and --lora-modules say which", "default-mm-loras lora-target-modules"),
    ("--enable-log-requests logs requests, not answers", "enable-log-outputs enable-log-deltas"),
    ("--otlp-traces-endpoint gives a trace per request", "collect-detailed-traces"),
    ("--profile-dir says that", "profiler-config"),
    ("log-probabilities are the model's own, as vLLM's default; leave it out", "logprobs-mode"),
    ("chat templates come from the server only; leave it out", "trust-request-chat-template"),
    ("prompts are text or token ids; leave it out", "enable-prompt-embeds skip-tokenizer-init"),
)
REFUSED = {name: why for why, names in _REFUSED for name in names.split()}
_SHORT = {"-q": "quantization", "-ep": "enable-expert-parallel", "-n": "nnodes", "-r": "node-rank", "-cc": "compilation-config"}


def add_harmless(parser: argparse.ArgumentParser) -> None:
    """They are parsed, and leave nothing behind."""
    for key, flag in HARMLESS.items():
        names = [f"--{key}"] if flag.short is None else [f"--{key}", flag.short]
        parser.add_argument(*names, action=_Check, key=key, nargs=None if flag.values else 0, help=argparse.SUPPRESS)


def check(key: str, value: Any) -> None:
    """Raises `ConfigError` unless the flag (by key) may be said with this value."""
    flag = HARMLESS.get(key)
    is_fine = flag is not None and (str(value) in flag.values if flag.values else value is True)
    if not is_fine:
        shown = "" if isinstance(value, bool) else f" {value}"
        raise ConfigError(f"--{key}{shown} is vLLM's, and is not supported here: {_reason(key)}")


def explain(flag: str) -> str | None:
    """Why a flag (as it was written) that nobody here knows is refused, if it is one of vLLM's."""
    key = _SHORT.get(flag, flag.lstrip("-"))
    if not is_known(key):
        return None
    return f"{flag} is vLLM's, and is not supported here: {_reason(key)}"


def is_known(key: str) -> bool:
    return any(name in names for name in (key, key.removeprefix("no-")) for names in (HARMLESS, REFUSED))


def _reason(key: str) -> str:
    name = key if key in HARMLESS or key in REFUSED else key.removeprefix("no-")
    return HARMLESS[name].why if name in HARMLESS else REFUSED[name]


class _Check(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, *, key: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **kwargs)
        self._key = key

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            check(self._key, values if HARMLESS[self._key].values else True)
        except ConfigError as error:
            parser.error(str(error))
