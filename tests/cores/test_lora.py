"""Which adapters there are, which the running requests use, which are resident."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cores.lora import LoraAdapters, LoraError, LoraNotFoundError, LoraSlots, RunningLoras


class Files:
    """A holder whose adapters are texts by path; the id of one is its text."""

    def __init__(self, **texts: str) -> None:
        self.texts = texts
        self.held: list[str] = []
        self.pinned: frozenset[str] = frozenset()
        self.num_reads = 0

    def load_lora(self, path: str) -> str:
        self.num_reads += 1
        if path not in self.texts:
            raise LoraNotFoundError(f"no {path}")
        if self.texts[path] not in self.held:
            self.held.append(self.texts[path])
        return self.texts[path]

    def drop_lora(self, lora_id: str) -> None:
        self.held.remove(lora_id)

    def pin_loras(self, lora_ids: frozenset[str]) -> None:
        self.pinned = lora_ids


@pytest.fixture
def files() -> Files:
    return Files(a="A", b="B", c="C", twin="A")


@pytest.fixture
def loras(files: Files) -> Iterator[LoraAdapters]:
    adapters = LoraAdapters(files, max_loras=3)
    yield adapters
    adapters.check_invariants()
    adapters.drop_unused(())
    assert sorted(files.held) == sorted(adapters._held), "the holder has what we think it has"


def test_an_adapter_is_asked_for_by_name_and_used_by_id(loras: LoraAdapters) -> None:
    loras.add("sql", "a")
    assert loras.resolve("sql") == "A"
    assert loras.resolve("sql", "A") == "A"
    with pytest.raises(LoraNotFoundError, match="adapter 'chat' is not loaded on this rank; loaded: 'sql'"):
        loras.resolve("chat")
    with pytest.raises(LoraNotFoundError, match="adapter 'sql' is not loaded"):
        loras.resolve("sql", "B")


def test_a_name_can_be_given_to_another_adapter_and_requests_keep_the_one_they_have(loras: LoraAdapters, files: Files) -> None:
    loras.add("sql", "a")
    loras.add("sql", "b")
    assert loras.resolve("sql") == "B"
    loras.drop_unused({"A"})
    assert loras.resolve("sql", "A") == "A", "a request that was sent before the change"
    loras.drop_unused(())
    assert files.held == ["B"]


def test_equal_files_are_held_once_and_as_long_as_one_name_is_left(loras: LoraAdapters, files: Files) -> None:
    loras.add("one", "a")
    loras.add("two", "twin")
    assert files.held == ["A"]
    assert loras.remove("one")
    loras.drop_unused(())
    assert loras.resolve("two") == "A"
    assert loras.remove("two")
    assert not loras.remove("two")
    loras.drop_unused(())
    assert files.held == []


def test_what_is_here_is_not_read_again_and_what_has_changed_is_refused(loras: LoraAdapters, files: Files) -> None:
    loras.add("sql", "a", "A")
    files.texts["a"] = "other"
    loras.add("sql", "a", "A")
    assert files.num_reads == 1
    loras.remove("sql")
    loras.drop_unused(())
    with pytest.raises(LoraError, match="files in 'a' have changed since adapter 'sql' was loaded"):
        loras.add("sql", "a", "A")
    loras.drop_unused(())
    assert files.held == []


def test_a_staged_adapter_stays_until_it_has_a_name_or_a_sync_takes_it_back(loras: LoraAdapters, files: Files) -> None:
    assert loras.stage("a") == "A"
    loras.stage("b")
    loras.drop_unused(())
    assert files.held == ["A", "B"]
    assert loras.resolve("soon", "A") == "A"
    loras.add("soon", "a", "A")
    assert loras.sync([("soon", "a", "A", False)]) == {}
    loras.drop_unused(())
    assert files.held == ["A"]


def test_sync_makes_exactly_what_is_wanted_and_says_what_it_could_not_get(loras: LoraAdapters, files: Files) -> None:
    loras.add("old", "c")
    loras.add("moved", "a")
    missing = loras.sync([("moved", "b", "B", True), ("gone", "nowhere", "X", False), ("changed", "c", "D", True)])
    assert set(missing) == {"gone", "changed"}
    assert "have changed" in missing["changed"]
    assert [(lora.name, lora.id, lora.is_pinned) for lora in loras.loras()] == [("moved", "B", True)]
    assert files.pinned == {"B"}


def test_pinned_adapters_leave_one_slot_to_the_others(loras: LoraAdapters, files: Files) -> None:
    for name in "abc":
        loras.add(name, name)
    loras.pin("a")
    loras.pin("a")
    loras.pin("b")
    with pytest.raises(LoraError, match=r"3 adapters cannot be pinned: one of the 3 slots \(--max-loras\)"):
        loras.pin("c")
    with pytest.raises(LoraNotFoundError, match="'d' is not loaded"):
        loras.pin("d")
    assert files.pinned == {"A", "B"}
    loras.remove("a")
    assert files.pinned == {"B"}
    with pytest.raises(LoraError, match="cannot be pinned"):
        loras.sync([(name, name, name.upper(), True) for name in "abc"])


def test_an_engine_without_lora_says_how_to_have_it() -> None:
    with pytest.raises(LoraError, match="start it with --enable-lora"):
        LoraAdapters(Files(a="A"), max_loras=0).add("a", "a")


@pytest.mark.parametrize("name", ["", 5, None])
def test_names_are_texts(loras: LoraAdapters, name: str) -> None:
    with pytest.raises(LoraError, match="name must be a text that is not empty, got"):
        loras.add(name, "a")


# --- running requests -----------------------------------------------------------------------------------------------------


def test_running_adapters_and_pinned_ones_share_the_slots() -> None:
    running = RunningLoras(2)
    running.add("a")
    running.add("a")
    running.pinned = frozenset({"p"})
    assert [running.has_room(lora_id) for lora_id in ("a", "p", "b")] == [True, True, False]
    running.pinned = frozenset()
    running.add("b")
    running.pinned = frozenset({"p"})  # pinned while it has no slot: it gets the next one
    assert [running.has_room(lora_id) for lora_id in ("a", "b", "p")] == [True, True, False]
    assert running.next_to_leave() == "b"
    running.remove("b")
    assert [running.has_room(lora_id) for lora_id in ("a", "b", "p")] == [True, False, True]
    running.check_invariants(["a", "a"])


# --- slots ----------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_adapter_gives_way() -> None:
    slots = LoraSlots(3)
    assert slots.assign(["a", "b", "c"]) == [(0, "a"), (1, "b"), (2, "c")]
    assert slots.assign(["a"]) == []
    assert slots.assign(["d"]) == [(1, "d")]
    assert slots.assign(["b", "a"]) == [(2, "b")]
    slots.release("d")
    slots.release("unknown")
    assert slots.assign(["e"]) == [(1, "e")]
    slots.check_invariants()


def test_a_pinned_adapter_keeps_its_slot() -> None:
    slots = LoraSlots(2)
    slots.assign(["a"])
    slots.pinned = frozenset({"a"})
    for other in "bcdb":
        assert slots.assign([other]) == [(1, other)]
    assert slots.slot_of("a") == 0


@given(
    steps=st.lists(st.one_of(st.sets(st.sampled_from("abcdef"), min_size=1, max_size=3), st.sampled_from("abcdef"))),
    pinned=st.sets(st.sampled_from("abcdef"), max_size=2),
)
def test_whoever_comes_has_a_slot_and_what_was_placed_there_last_is_there(
    steps: list[set[str] | str], pinned: set[str]
) -> None:
    slots = LoraSlots(3)
    contents: dict[int, str] = {}
    for step in steps:
        if isinstance(step, str):
            slots.release(step)
        elif len(step | pinned) <= 3:
            placed = slots.assign(sorted(step))
            slots.pinned = frozenset(pinned)
            kept = pinned & set(contents.values())
            contents.update(placed)
            assert all(contents[slots.slot_of(lora_id)] == lora_id for lora_id in step)
            assert all(contents[slots.slot_of(i)] == i for i in kept if i in slots._slots)
            assert {contents[slot] for slot in slots._slots.values()} == slots._slots.keys()
        slots.check_invariants()
