"""Numbers by which a receiver sees that something was lost on the way. Knows no sockets.

Over tcp a connection may break while both ends live: a firewall resets it, a cable is out for a while. ZMQ makes a new one
without a word, and what was in the old one is gone. Commands have numbers anyway; frames to a front end get one each.
"""

from __future__ import annotations

from cores.codec import CodecError
from cores.messages import RankId

NUMBER_BYTES = 8
LIFE_SHIFT = 32  # a front end's number of lives, above the number of the command within one


def seq_before_life(life: int) -> int:
    """What a front end that starts for the `life`-th time counts its commands from."""
    return life << LIFE_SHIFT


class CommandGaps:
    """An engine's view of the commands of one front end, over all lives of that."""

    def __init__(self) -> None:
        self._last = -1

    def num_lost_before(self, seq: int) -> int:
        """Not 0 also for what comes twice."""
        life = seq >> LIFE_SHIFT
        last = self._last if self._last >> LIFE_SHIFT == life else seq_before_life(life)
        self._last = seq
        return seq - last - 1


def numbered(number: int, frame: bytes) -> list[bytes]:
    return [number.to_bytes(NUMBER_BYTES, "big"), frame]


def split_number(frames: list[bytes]) -> tuple[int, bytes]:
    """Raises `CodecError`."""
    if len(frames) != 2 or len(frames[0]) != NUMBER_BYTES:
        raise CodecError(f"expected a number of {NUMBER_BYTES} bytes and a message, got {len(frames)} frames")
    return int.from_bytes(frames[0], "big"), frames[1]


class OutputGaps:
    """A front end's view of what its ranks have sent."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}  # epoch and number, by rank

    def num_lost_before(self, rank_id: RankId, number: int) -> int:
        epoch, last = self._last.get(rank_id.rank, (0, 0))
        if rank_id.epoch < epoch:
            return 0  # whatever it is: that life is over
        if rank_id.epoch > epoch:
            last = 0
        self._last[rank_id.rank] = rank_id.epoch, number
        return number - last - 1
