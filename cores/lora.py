"""The LoRA adapters of one engine: which there are, which the running requests use, which are resident. Pure bookkeeping.

Rules
-----
* An adapter is known by its id, a hash of its files: the same on every rank, and another one for other weights under an old
  name. Requests and cached prefixes go by the id; a name is only how an adapter is asked for.
* Removing or replacing a name ends nothing. Requests that use the adapter go on with it; with the last of them it is dropped.
* A runner holds every adapter in host memory and the `max_loras` most recently used ones resident, in slots. So no step may use
  more than that many. A pinned adapter keeps its slot; one slot at least is never pinned, or the others could not be served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol


class LoraError(ValueError):
    """An adapter that cannot be served, or is not there. Says which and why."""


class LoraNotFoundError(LoraError):
    """There is no adapter where one should be."""


class LoraHolder(Protocol):
    """Has the weights: a model runner."""

    def load_lora(self, path: str) -> str: ...

    def drop_lora(self, lora_id: str) -> None: ...

    def pin_loras(self, lora_ids: frozenset[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class NamedLora:
    name: str
    path: str
    id: str
    is_pinned: bool = False

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


class LoraAdapters:
    """By name for those who ask, by id for requests. `max_loras` = 0: the engine serves none."""

    def __init__(self, holder: LoraHolder, max_loras: int) -> None:
        self.pinned: frozenset[str] = frozenset()  # ids
        self.unnamed: frozenset[str] = frozenset()  # ids that nobody can ask for any more: dropped once no request uses them
        self._holder = holder
        self._max_loras = max_loras
        self._by_name: dict[str, NamedLora] = {}
        self._staged: set[str] = set()  # ids that will be asked for, it is said, and have no name yet
        self._held: set[str] = set()  # ids of all that the holder has

    def stage(self, path: str) -> str:
        """Loads an adapter without a name: whatever can go wrong with it goes wrong here, and nobody has seen it yet."""
        if not self._max_loras:
            raise LoraError("this engine serves no LoRA adapters; start it with --enable-lora")
        lora_id = self._holder.load_lora(_checked_text("path", path))
        self._held.add(lora_id)
        self._staged.add(lora_id)
        return lora_id

    def add(self, name: str, path: str, lora_id: str | None = None) -> NamedLora:
        """Names an adapter; a name in use means the new one from now on. `lora_id` is what must be found in `path`, which is
        not read at all if that one is here."""
        _checked_text("name", name)
        if lora_id is None or lora_id not in self._held:
            found = self.stage(path)
            self._staged.discard(found)
            if lora_id not in (None, found):
                self._settle()
                raise LoraError(f"the files in {path!r} have changed since adapter {name!r} was loaded from there")
            lora_id = found
        self._staged.discard(lora_id)
        lora = self._by_name[name] = NamedLora(name, path, lora_id)
        self._settle()
        return lora

    def remove(self, name: str) -> bool:
        """False when there is none of that name."""
        found = self._by_name.pop(name, None) is not None
        self._settle()
        return found

    def pin(self, name: str) -> None:
        lora = self._by_name.get(name)
        if lora is None:
            raise LoraNotFoundError(self._not_loaded(name))
        self._set_pinned(self.pinned | {lora.id})

    def _set_pinned(self, pinned: frozenset[str]) -> None:
        if len(pinned) >= max(1, self._max_loras):
            raise LoraError(
                f"{len(pinned)} adapters cannot be pinned: one of the {self._max_loras} slots (--max-loras) must be left for"
                " the others"
            )
        self.pinned = pinned
        self._settle()

    def loras(self) -> list[NamedLora]:
        return [NamedLora(lora.name, lora.path, lora.id, lora.id in self.pinned) for lora in self._by_name.values()]

    def sync(self, wanted: Iterable[Sequence[Any]]) -> dict[str, str]:
        """Makes these, as (name, path, id, is pinned), all that there are. Why those are missing that could not be had."""
        loras = [NamedLora(*values) for values in wanted]
        self._staged.clear()
        for name in self._by_name.keys() - {lora.name for lora in loras}:
            del self._by_name[name]
        missing = {}
        for lora in loras:
            try:
                self.add(lora.name, lora.path, lora.id)
            except LoraError as error:
                self._by_name.pop(lora.name, None)  # an older one of that name is not what was asked for
                missing[lora.name] = str(error)
        self._set_pinned(frozenset(lora.id for lora in loras if lora.is_pinned))
        return missing

    def resolve(self, name: str, lora_id: str | None = None) -> str:
        """The id of a request's adapter. One that is asked for by id may have lost its name meanwhile."""
        if lora_id is not None:
            if lora_id not in self._held:
                raise LoraNotFoundError(self._not_loaded(name))
            return lora_id
        if name not in self._by_name:
            raise LoraNotFoundError(self._not_loaded(name))
        return self._by_name[name].id

    def drop_unused(self, in_use: Collection[str]) -> None:
        """Frees the unnamed ones, but for those that requests use."""
        for lora_id in self.unnamed.difference(in_use):
            self._holder.drop_lora(lora_id)
            self._held.remove(lora_id)
        self._settle()

    def _settle(self) -> None:
        """Called after every change."""
        named = {lora.id for lora in self._by_name.values()}
        self.unnamed = frozenset(self._held - named - self._staged)
        self.pinned &= named
        self._holder.pin_loras(self.pinned)

    def _not_loaded(self, name: str) -> str:
        return f"adapter {name!r} is not loaded on this rank; loaded: {', '.join(map(repr, self._by_name)) or 'none'}"

    def check_invariants(self) -> None:
        named = {lora.id for lora in self._by_name.values()}
        assert named <= self._held
        assert self._staged <= self._held
        assert self.unnamed == self._held - named - self._staged
        assert self.pinned <= named
        assert not self.pinned or len(self.pinned) < self._max_loras


def _checked_text(field: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise LoraError(f"an adapter's {field} must be a text that is not empty, got {value!r}")
    return value


class RunningLoras:
    """Which adapters the running requests use, and whether one more fits beside them and the pinned ones."""

    def __init__(self, max_loras: int) -> None:
        self.pinned: frozenset[str] = frozenset()
        self._max_loras = max_loras
        self._counts: Counter[str] = Counter()  # running requests by adapter, none of them 0

    def has_room(self, lora_id: str) -> bool:
        if lora_id in self._counts:
            return True
        return len(self._counts.keys() | self.pinned | {lora_id}) <= self._max_loras

    def counts(self) -> Counter[str]:
        """Running requests by adapter."""
        return Counter(self._counts)

    def add(self, lora_id: str) -> None:
        self._counts[lora_id] += 1

    def remove(self, lora_id: str) -> None:
        self._counts[lora_id] -= 1
        if not self._counts[lora_id]:
            del self._counts[lora_id]

    def next_to_leave(self) -> str:
        """The adapter whose slot will be free first if no more requests may use it: that with the fewest. Only when one had no
        room."""
        return min(self._counts.keys() - self.pinned, key=lambda lora_id: (self._counts[lora_id], lora_id))

    def check_invariants(self, running: Iterable[str]) -> None:
        """`running` are the adapters of all running requests, each as often as it is used."""
        assert self._counts == Counter(running)
        assert len(self._counts) <= self._max_loras


class LoraSlots:
    """Which adapter is resident in which slot. The least recently used one that is not pinned gives way."""

    def __init__(self, num_slots: int) -> None:
        self.pinned: frozenset[str] = frozenset()
        self._num_slots = num_slots
        self._slots: dict[str, int] = {}  # least recently used first

    def assign(self, lora_ids: Collection[str]) -> list[tuple[int, str]]:
        """Makes all of these resident. Those that were not, with their slots: their weights are to be put there."""
        resident = [lora_id for lora_id in lora_ids if lora_id in self._slots]
        for lora_id in resident:
            self._slots[lora_id] = self._slots.pop(lora_id)  # now the most recently used
        placed = []
        for lora_id in lora_ids:
            if lora_id not in self._slots:
                self._slots[lora_id] = slot = self._free_slot(lora_ids)
                placed.append((slot, lora_id))
        return placed

    def slot_of(self, lora_id: str) -> int:
        return self._slots[lora_id]

    def release(self, lora_id: str) -> None:
        """Its slot is free. Not resident: no-op."""
        self._slots.pop(lora_id, None)

    def _free_slot(self, in_use: Collection[str]) -> int:
        if len(self._slots) < self._num_slots:
            return min(set(range(self._num_slots)).difference(self._slots.values()))
        victim = next((i for i in self._slots if i not in in_use and i not in self.pinned), None)
        assert victim is not None, f"{len(in_use)} adapters in one step, and {len(self.pinned)} pinned: too many for the slots"
        return self._slots.pop(victim)

    def check_invariants(self) -> None:
        assert len(set(self._slots.values())) == len(self._slots) <= self._num_slots
        assert all(0 <= slot < self._num_slots for slot in self._slots.values())
