"""What is made of Ray's paragraphs. Knows their wording, and imports no Ray: that reads its token once, when it is imported."""

from __future__ import annotations

import logging
import re

logger = logging.getLogger(__name__)

MAX_SUMMARY = 300  # characters
_SAYS_NOTHING = "Worker unexpectedly exits with a connection error code 2. End of file."  # of any that was killed or crashed
_NAMING = re.compile(r"\t\w+: ")  # lines of Ray's that say which actor


def summary(text: str) -> str:
    """Ray's error texts are paragraphs; the facts are in the last sentence, but for its guesses. The rest is for DEBUG. Nothing
    where there is no fact."""
    logger.debug("Ray says: %s", text)
    detail = text.rpartition("Worker exit detail: ")[2] if "Worker exit detail: " in text else text
    lines = [line for line in detail.splitlines() if line.strip() and not _NAMING.match(line)]
    # The first line says that an actor died, which is known.
    facts = lines[1:] if len(lines) > 1 and lines[0].startswith("The actor died") else lines
    plain = " ".join(" ".join(facts).partition(" Some common causes include")[0].split())
    if plain == _SAYS_NOTHING:
        return ""
    return plain if len(plain) <= MAX_SUMMARY else plain[:MAX_SUMMARY].rsplit(" ", 1)[0] + " …"
