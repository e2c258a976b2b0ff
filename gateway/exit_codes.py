"""What the programs of the gateway say with their exit code, beside 0 and what a command's own help lists."""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_USAGE = 2
