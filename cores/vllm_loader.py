"""From a configuration to vLLM's engine in this process, or a `ConfigError` that says why not.

The only file that imports vLLM.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cores.config import ConfigError, EngineConfig
from cores.request import Request
from cores.runner.interface import ModelInfo
from cores.runner.model_dir import read_eos_token_ids, read_json
from cores.runner.pooling_kind import read_pooling_kind
from cores.sampling_params import OPTIONAL_FEATURES, SamplingParams
from cores.step_engine import HostedEngine, StepEngine
from cores.structured_outputs import GrammarError, as_lark, load_grammar_tokenizer
from cores.vllm_cache import VllmCache
from cores.vllm_engine_core import RequestRefusedError, VllmEngine
from cores.vllm_mapping import cache_salt, engine_args, sampling_args
from cores.vllm_operations import VllmOperations

logger = logging.getLogger(__name__)

NO_SLEEP_ON_CPU = "vLLM does not sleep on a CPU"
GRAMMAR_TIMEOUT_S = 10.0


def load_vllm(config: EngineConfig, num_threads: int | None) -> tuple[ModelInfo, HostedEngine]:
    """Raises `ConfigError` for what cannot be served; whatever else vLLM raises is a fault of its own."""
    if read_pooling_kind(config.model, config.runner) is not None:
        raise ConfigError(
            f"--engine vllm serves models that generate text, {config.model} makes embeddings: use --engine torch"
        )
    set_environment(os.environ, config, num_threads)
    core = _start(config)
    vllm_config = core.vllm_config
    if "generate" not in core.get_supported_tasks():
        raise ConfigError(f"--engine vllm serves models that generate text, {config.model} does not")
    device, can_sleep = _device()
    info = ModelInfo(
        device=device,
        max_model_len=vllm_config.model_config.max_model_len,
        vocab_size=vllm_config.model_config.get_vocab_size(),
        eos_token_ids=read_eos_token_ids(Path(config.model), read_json(Path(config.model) / "config.json")),
        num_kv_blocks=vllm_config.cache_config.num_gpu_blocks or 0,
        block_size=vllm_config.cache_config.block_size,
        features=OPTIONAL_FEATURES,
        no_sleep="" if can_sleep else NO_SLEEP_ON_CPU,
    )
    make_request = _request_maker(core, info.eos_token_ids)
    cache = core.scheduler.kv_event_publisher = VllmCache(info.block_size)
    warm_up(VllmEngine(core, make_request, cache, info.max_model_len, info.num_kv_blocks))
    core.reset_prefix_cache()
    engine = VllmEngine(core, make_request, cache, info.max_model_len, info.num_kv_blocks)
    return info, HostedEngine(engine, VllmOperations(core))


def warm_up(engine: StepEngine) -> None:
    """Runs a prompt and a decode. vLLM compiles kernels when they are first used: the first step of SmolLM2 took 12 s on two
    cores, after which a balancer would believe for long that this rank computes a prompt token in two seconds."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=2, ignore_eos=True)
    request = Request((0, 0), "warm-up", [0] * 8, 8, 8, params, max_total_tokens=10)
    finished = engine.add_request(request, 0.0)
    assert finished is None, f"vLLM refuses a simple request: {finished}"
    while engine.has_work:
        engine.step(0.0)


def set_environment(environment: Any, config: EngineConfig, num_threads: int | None) -> None:
    """What vLLM reads when it is imported. A user's own settings stay, but for what decides which process does what."""
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model runs in this process: one rank is one process to kill
    environment["VLLM_CONFIGURE_LOGGING"] = "0"  # its lines are lines of our log
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    environment.setdefault("VLLM_HOST_IP", "127.0.0.1")
    if num_threads is not None:
        environment.setdefault("OMP_NUM_THREADS", str(num_threads))
    if config.kv_cache_memory_bytes is not None:
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would beat the flag


def _start(config: EngineConfig) -> Any:
    is_debugging = logging.getLogger().level <= logging.DEBUG
    logging.getLogger("vllm").setLevel(logging.INFO if is_debugging else logging.WARNING)  # thirty lines at each start
    try:
        from vllm.config import KVEventsConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor
    except ImportError as error:
        raise ConfigError(f"--engine vllm needs the package vllm, which cannot be imported: {error}") from error
    kind = str(current_platform.device_type)
    if config.device not in ("auto", kind):
        raise ConfigError(f"--device {config.device}: the vLLM that is installed here runs on {kind}")
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    args = engine_args(config, known, _cpu_kv_cache_bytes() if kind == "cpu" else None)
    if config.enable_prefix_caching:  # for `VllmCache`, which takes the null publisher's place
        args["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    if current_platform.is_sleep_mode_available():
        args["enable_sleep_mode"] = True
    try:
        vllm_config = EngineArgs(**args).create_engine_config()
        return EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    except ValueError as error:  # of settings, and of memory that is not there
        raise ConfigError(f"vLLM cannot serve {config.model}: {error}") from error


def _cpu_kv_cache_bytes() -> int:
    """As much as our own engine would take."""
    import torch

    from cores.loader import free_memory_bytes
    from cores.runner.paged_kv_cache import CPU_MAX_BYTES, CPU_MEMORY_SHARE

    return int(min(CPU_MAX_BYTES, free_memory_bytes(torch.device("cpu")) * CPU_MEMORY_SHARE))


def _device() -> tuple[str, bool]:
    """What `/status` shows, and whether it can sleep."""
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    name = "cpu" if kind == "cpu" else f"{kind}:0 {current_platform.get_device_name()}"
    return name, bool(current_platform.is_sleep_mode_available())


def _request_maker(core: Any, eos_token_ids: tuple[int, ...]) -> Callable[[str, Request], Any]:
    """Requests as vLLM's own front end makes them: it knows the model's EOS and how words are spelled, and refuses what it
    cannot serve."""
    from vllm.exceptions import VLLMClientError
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.engine.input_processor import InputProcessor

    inputs, tasks, model = InputProcessor(core.vllm_config), core.get_supported_tasks(), core.vllm_config.model_config

    @functools.cache
    def load_tokenizer() -> Any:
        return load_grammar_tokenizer(model.model, model.get_vocab_size(), eos_token_ids)

    def make(name: str, request: Request) -> Any:
        args, wanted = sampling_args(request), request.sampling_params.structured_outputs
        try:
            if wanted is not None:
                args["structured_outputs"] = StructuredOutputsParams(
                    grammar=as_lark(load_tokenizer() if wanted.reasoning else None, wanted)
                )
            prompt = tokens_input(request.token_ids, cache_salt=cache_salt(request))
            processed = inputs.process_inputs(
                name, prompt, SamplingParams(**args), tasks, arrival_time=request.arrival_time_s, priority=request.priority
            )
            theirs, _ = core.preprocess_add_request(processed)
        except (VLLMClientError, GrammarError, ValueError, TypeError, NotImplementedError) as error:
            raise RequestRefusedError(str(error)) from error
        replay_grammar(theirs, request.token_ids[request.num_original_prompt_tokens :])
        return theirs

    return make


def replay_grammar(theirs: Any, earlier: list[int], sleep: Callable[[float], None] = time.sleep) -> None:
    """Of a continued request: its grammar has seen the tokens that it had elsewhere. Raises `RequestRefusedError`."""
    wanted = theirs.structured_output_request
    if wanted is None or not earlier:
        return
    deadline_s = time.monotonic() + GRAMMAR_TIMEOUT_S
    while not wanted.is_grammar_ready:  # a thread of vLLM's compiles it
        if time.monotonic() > deadline_s:
            raise RequestRefusedError(f"its grammar was not compiled within {GRAMMAR_TIMEOUT_S:g} s")
        sleep(0.001)
    if isinstance(wanted.grammar, Exception):
        raise RequestRefusedError(f"its grammar does not compile: {wanted.grammar}")
    if not wanted.grammar.accept_tokens(theirs.request_id, earlier):
        raise RequestRefusedError("its grammar does not accept the tokens that it had before")
