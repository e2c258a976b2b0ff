"""What the programs of the gateway say with their exit code, beside 0 and what a command's own help lists."""

from __future__ import annotations

import signal

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT  # as shells say it
EXIT_NO_READER = 128 + signal.SIGPIPE
