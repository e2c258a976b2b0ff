"""`python -m gateway.launch`: the launcher as a child, told by one JSON line on stdin, and ending with it.

`{"kind": "embedded", "config": …, "run_directory": …}`: for the front end that is the parent. Prints one JSON line with the
control address. `{"kind": "endpoint", "config": …}`: a whole endpoint, as `gateway serve` is, for the supervisor of several.
The configuration does not go on the command line, where everybody could read the API keys.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

from cores.config import from_plain
from cores.launch.child_process import parent_died, read_task
from gateway.config import GatewayConfig
from gateway.launch.launcher import Launcher
from gateway.launch.ranks import make_rank_launcher
from gateway.launch.serve import EXIT_FAILED, StopSignals, cancelled_at_exit, run, serve, stop_or_kill
from gateway.log import set_up_logging

logger = logging.getLogger(__name__)


def main() -> int:
    task = read_task()
    config = from_plain(GatewayConfig, task["config"])
    if task["kind"] == "endpoint":
        return serve(config, is_child=True)
    set_up_logging(config.log_level)
    return asyncio.run(_run_embedded(config, Path(task["run_directory"])))


async def _run_embedded(config: GatewayConfig, run_directory: Path) -> int:
    signals = StopSignals()
    launcher = Launcher(config, make_rank_launcher(config, run_directory), run_directory)
    launcher.open()
    _answer({"control_address": launcher.control_address})
    orphaned = asyncio.ensure_future(parent_died())
    with cancelled_at_exit(orphaned):
        cause = await run(launcher, signals, orphaned, lambda: None)
        if not await stop_or_kill(launcher, 0.0, signals):
            return 128 + signals.last
    if cause:
        logger.error("%s", cause)
        return EXIT_FAILED
    return 0


def _answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    sys.exit(main())
