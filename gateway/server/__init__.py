"""The OpenAI-compatible HTTP server over an `EngineClient`. Knows no ranks, no policies and no ZMQ."""

from gateway.server.app import RunningServer, create_app, run_server
from gateway.server.state import ServerState

__all__ = ["RunningServer", "ServerState", "create_app", "run_server"]
