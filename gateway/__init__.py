"""The front end: an OpenAI-compatible server, `AsyncLLM`, and the core clients that reach the engine cores over ZMQ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cores.sampling_params import SamplingParams
    from gateway.async_llm import AsyncLLM
    from gateway.config import GatewayConfig

__all__ = ["AsyncLLM", "GatewayConfig", "SamplingParams"]

_HOMES = {
    "AsyncLLM": "gateway.async_llm",
    "GatewayConfig": "gateway.config",
    "SamplingParams": "cores.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Loads the public names on first use: `gateway status` must not pay for the engine client's imports."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
