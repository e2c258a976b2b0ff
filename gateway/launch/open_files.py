"""How many files and connections this process and its children may have open."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

WANTED = 65_536


def raise_open_files_limit(wanted: int = WANTED) -> int:
    """Raises the soft limit, which is 1,024 on many machines and no more clients than that, as far as the hard one lets us.

    Returns the limit as it is now. Children inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    logger.debug("open files: raised the limit from %d to %d", soft, limit)
    return limit
