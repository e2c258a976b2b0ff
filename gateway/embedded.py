"""The launcher as a child process, for an `AsyncLLM` that lives in a user's script. Imports neither ray nor torch.

The script's process is the front end: it connects to the launcher's control socket and says hello, as a child front end does.
"""

from __future__ import annotations

import asyncio
import json
import logging

from cores.config import Transport, from_plain, to_plain
from cores.launch.child_process import ChildProcess
from gateway.config import GatewayConfig
from gateway.errors import EngineDeadError

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0  # the launcher's own bounds strike first


class EmbeddedLauncher:
    """A running launcher, from `start_embedded_launcher` to `stop`. It ends with this process, however that ends."""

    def __init__(self, child: ChildProcess, control_address: str, transport: Transport) -> None:
        self.control_address = control_address
        self.transport = transport
        self._child = child

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._child.returncode

    async def stop(self) -> None:
        """Ends the ranks and everything they ran on. Bounded, idempotent."""
        self._child.close_stdin()
        if not await self._child.end(STOP_TIMEOUT_S):
            logger.error("the launcher did not end within %g s and was killed", STOP_TIMEOUT_S)


async def start_embedded_launcher(config: GatewayConfig, run_directory: str) -> EmbeddedLauncher:
    """Returns when the launcher listens. It starts its ranks once the front end's hello has come, and removes the directory
    when it ends.

    Raises `EngineDeadError` with the launcher's own words when it cannot even do that.
    """
    task = {"kind": "embedded", "config": to_plain(config), "run_directory": run_directory}
    child = await ChildProcess.start("launcher", "gateway.launch", task, answers=True)
    try:
        line = await asyncio.wait_for(child.read_line(), ANSWER_TIMEOUT_S)
        if not line:
            await asyncio.wait_for(child.wait(), ANSWER_TIMEOUT_S)
            raise EngineDeadError(f"the launcher did not start: {child.describe_exit()}")
        answer = json.loads(line)
        return EmbeddedLauncher(child, answer["control_address"], from_plain(Transport, answer["transport"]))
    except TimeoutError as error:
        await child.kill()
        raise EngineDeadError(f"the launcher did not start within {ANSWER_TIMEOUT_S:g} s") from error
    except BaseException:
        await child.kill()
        raise
