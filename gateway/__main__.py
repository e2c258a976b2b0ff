"""`python -m gateway`, and the console script `gateway`."""

from __future__ import annotations

import sys

from gateway.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
