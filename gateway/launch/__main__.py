"""`python -m gateway.launch`: the launcher as a child, told by one JSON line on stdin, and ending with it.

`{"kind": "embedded", "config": …, "run_directory": …}`: for the front end that is the parent. Prints one JSON line with the
control address and how to speak to it. `{"kind": "endpoint", "config": …}`: a whole endpoint, as `gateway serve` is, for the
supervisor of several.
The configuration does not go on the command line, where everybody could read the API keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import TextIO

from cores.config import Transport, from_plain, to_plain
from cores.launch.child_process import read_task
from cores.log import PrintedLines, set_up_logging
from cores.log_queue import unblock_stderr
from gateway.config import GatewayConfig
from gateway.launch.launcher import Launcher
from gateway.launch.ranks import make_rank_launcher
from gateway.launch.serve import live, serve


def main() -> int:
    task = read_task()
    config = from_plain(GatewayConfig, task["config"])
    if task["kind"] == "endpoint":
        return serve(config, is_child=True)
    unblock_stderr()
    set_up_logging(config.log_level, config.log_format)
    stdout = sys.stdout
    # The answer below is all that the parent reads there.
    with contextlib.redirect_stdout(PrintedLines(logging.getLogger("ray.printed"), logging.DEBUG)):
        return asyncio.run(_run_embedded(config, Path(task["run_directory"]), stdout))


async def _run_embedded(config: GatewayConfig, run_directory: Path, stdout: TextIO) -> int:
    def tell_parent(control_address: str, transport: Transport) -> None:
        answer = {"control_address": control_address, "transport": to_plain(transport)}
        print(json.dumps(answer), file=stdout, flush=True)

    launcher = Launcher(config, make_rank_launcher(config, run_directory), run_directory, on_listening=tell_parent)
    try:
        return await live(launcher, lambda: None, drain_timeout_s=0.0, ends_with_stdin=True)
    finally:
        shutil.rmtree(run_directory, ignore_errors=True)  # the parent's, which may have been killed: we are the last one here


if __name__ == "__main__":
    sys.exit(main())
