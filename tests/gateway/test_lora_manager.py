"""Adapters over several ranks: real engine cores with the simulated runner, called without a wire between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cores.config import EngineConfig
from cores.engine_core import EngineCore
from cores.messages import RankId, UtilityCall
from cores.runner.simulated import SimulatedModelRunner
from cores.testing import ManualClock, make_tiny_model_dir
from gateway.errors import EngineDeadError, EngineGenerateError, InvalidRequestError, OverloadedError
from gateway.lora_manager import LoraManager
from gateway.lora_store import LoraAdapter, LoraStore, OwnLoraStore, SharedLoraStore
from gateway.shared_value import SharedValue


class LocalRanks:
    """What a core client is for the manager, over engine cores in this process."""

    def __init__(self, model: Path, num_ranks: int = 2) -> None:
        self.model = model
        self.cores: dict[RankId, EngineCore] = {}
        self.calls: list[tuple[int, str]] = []  # rank and method
        self.missing: dict[RankId, dict[str, str]] = {}
        self.dies_of: tuple[int, str] | None = None  # rank, method: it does not answer that call any more
        self.timeouts: dict[str, float | None] = {}  # of the last call, by method
        self.answers: dict[tuple[int, str], Any] = {}  # by rank and method: instead of its own
        self.starting: RankId | None = None  # is there, and takes no requests yet
        self.hangs_at: str | None = None  # a method that no rank answers before `go_on`
        self.go_on = asyncio.Event()
        for rank in range(num_ranks):
            self.start(RankId(rank, 1))

    def start(self, rank_id: RankId) -> None:
        config = EngineConfig(model=str(self.model), engine="simulated", enable_lora=True, max_loras=3, num_kv_blocks=16)
        runner = SimulatedModelRunner(config, rank_id, sleep=lambda _: None)
        self.cores[rank_id] = EngineCore(rank_id, config, runner.load(), runner, ManualClock())

    @property
    def serving(self) -> list[RankId]:
        return [rank_id for rank_id in self.cores if rank_id != self.starting]

    async def call_utility_on(
        self, rank_ids: Sequence[RankId], method: str, *args: Any, timeout_s: float | None = None
    ) -> list[Any]:
        self.timeouts[method] = timeout_s
        results = [self._call(rank_id, method, args) for rank_id in rank_ids]
        if method == self.hangs_at:
            await self.go_on.wait()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def _call(self, rank_id: RankId, method: str, args: tuple[Any, ...]) -> Any:
        self.calls.append((rank_id.rank, method))
        if self.dies_of == (rank_id.rank, method):
            self.dies_of = None
            del self.cores[rank_id]
            return EngineDeadError(f"{rank_id} died: test", rank_id.rank, "test")
        if (rank_id.rank, method) in self.answers:
            return self.answers[rank_id.rank, method]
        result = self.cores[rank_id].call_utility(UtilityCall(1, 1, method, args))
        self.cores[rank_id].check_invariants()
        assert result is not None
        if result.error is None:
            return result.value
        return (InvalidRequestError if result.is_refusal else EngineGenerateError)(f"{rank_id}: {result.error}")

    def set_missing_loras(self, rank_id: RankId, missing: dict[str, str]) -> None:
        self.missing[rank_id] = missing

    def names(self) -> dict[RankId, list[str]]:
        return {rank_id: [lora["name"] for lora in core.loras.list_loras()] for rank_id, core in self.cores.items()}

    def num_held(self) -> list[int]:
        """Adapters in memory by rank, with a name or without."""
        return [len(core.loras._adapters._held) for core in self.cores.values()]


R0, R1 = RankId(0, 1), RankId(1, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def ranks(model: Path) -> LocalRanks:
    return LocalRanks(model)


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    for name in ("sql", "chat"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    return {name: str(tmp_path / name) for name in ("sql", "chat")}


async def start(ranks: LocalRanks, store: LoraStore | None = None, **options: Any) -> LoraManager:
    manager = LoraManager(ranks, store or OwnLoraStore(), ("base",), **{"is_enabled": True} | options)
    await manager.adopt()
    return manager


async def test_an_adapter_is_there_on_every_rank_before_anybody_can_ask_for_it(
    ranks: LocalRanks, paths: dict[str, str]
) -> None:
    manager = await start(ranks)
    ranks.hangs_at = "stage_lora"
    adding = asyncio.create_task(manager.add("sql", paths["sql"]))
    while (1, "stage_lora") not in ranks.calls:
        await asyncio.sleep(0)
    assert manager.find("sql") is None
    ranks.go_on.set()
    adapter = await adding
    assert manager.find("sql") == adapter
    assert manager.adapters() == [adapter]
    assert ranks.names() == {R0: ["sql"], R1: ["sql"]}
    assert [core.loras.list_loras()[0]["id"] for core in ranks.cores.values()] == [adapter.id] * 2


async def test_what_one_rank_cannot_load_no_rank_keeps(ranks: LocalRanks, paths: dict[str, str]) -> None:
    manager = await start(ranks)
    ranks.answers[1, "stage_lora"] = {"id": None, "error": "its rank is too high", "is_missing": False}
    with pytest.raises(InvalidRequestError, match=r"rank 1 \(epoch 1\): its rank is too high") as caught:
        await manager.add("sql", paths["sql"])
    assert (caught.value.status, caught.value.param) == (400, "lora_path")
    assert manager.adapters() == []
    assert ranks.num_held() == [0, 0]


async def test_a_path_without_an_adapter_is_404(ranks: LocalRanks) -> None:
    manager = await start(ranks)
    with pytest.raises(InvalidRequestError, match="adapter directory '/no/such' does not exist") as caught:
        await manager.add("sql", "/no/such")
    assert caught.value.status == 404


async def test_a_rank_that_dies_while_loading_fails_the_call_and_one_that_dies_later_does_not(
    ranks: LocalRanks, paths: dict[str, str]
) -> None:
    manager = await start(ranks)
    ranks.dies_of = (1, "stage_lora")
    with pytest.raises(EngineDeadError, match="rank 1"):
        await manager.add("sql", paths["sql"])
    assert manager.find("sql") is None
    assert ranks.num_held() == [0]
    ranks.start(RankId(1, 2))
    ranks.dies_of = (1, "add_lora")
    await manager.add("sql", paths["sql"])
    assert ranks.names() == {R0: ["sql"]}


async def test_a_rank_that_starts_again_gets_everything_back(ranks: LocalRanks, paths: dict[str, str]) -> None:
    manager = await start(ranks)
    for name, path in paths.items():
        await manager.add(name, path)
    await manager.pin("chat")
    del ranks.cores[R1]
    ranks.start(RankId(1, 2))
    await manager.restore(RankId(1, 2), 600.0)
    assert ranks.cores[RankId(1, 2)].loras.list_loras() == ranks.cores[R0].loras.list_loras()
    assert ranks.missing == {R0: {}, R1: {}, RankId(1, 2): {}}


async def test_a_rank_that_finds_other_files_goes_without_that_adapter_and_says_so(
    ranks: LocalRanks, paths: dict[str, str]
) -> None:
    manager = await start(ranks)
    for name, path in paths.items():
        await manager.add(name, path)
    (Path(paths["sql"]) / "adapter_config.json").write_text("changed")
    ranks.start(RankId(1, 2))
    await manager.restore(RankId(1, 2), 600.0)
    assert ranks.names()[RankId(1, 2)] == ["chat"]
    assert "have changed since adapter 'sql' was loaded" in ranks.missing[RankId(1, 2)]["sql"]
    assert manager.find("sql") is not None, "the other rank has it"


async def test_a_rank_is_restored_after_a_change_that_began_before(ranks: LocalRanks, paths: dict[str, str]) -> None:
    manager = await start(ranks)
    ranks.calls.clear()
    ranks.hangs_at = "stage_lora"
    adding = asyncio.create_task(manager.add("sql", paths["sql"]))
    while (1, "stage_lora") not in ranks.calls:
        await asyncio.sleep(0)
    del ranks.cores[R1]
    ranks.starting = RankId(1, 2)
    ranks.start(ranks.starting)
    restoring = asyncio.create_task(manager.restore(ranks.starting, 600.0))
    await asyncio.sleep(0)
    assert (1, "sync_loras") not in ranks.calls, "it waits for its turn"
    ranks.go_on.set()
    await asyncio.gather(adding, restoring)
    assert ranks.names() == {R0: ["sql"], RankId(1, 2): ["sql"]}


async def test_a_name_is_taken_until_it_is_removed_or_replaced_in_place(ranks: LocalRanks, paths: dict[str, str]) -> None:
    manager = await start(ranks)
    first = await manager.add("mine", paths["sql"])
    with pytest.raises(InvalidRequestError, match="'mine' has already been loaded"):
        await manager.add("mine", paths["chat"])
    second = await manager.add("mine", paths["chat"], load_inplace=True)
    assert first.id != second.id
    assert manager.adapters() == [second]
    assert ranks.num_held() == [1, 1]
    await manager.remove("mine")
    assert ranks.num_held() == [0, 0]
    with pytest.raises(InvalidRequestError, match="'mine' cannot be found; loaded: none") as caught:
        await manager.remove("mine")
    assert caught.value.status == 404
    await manager.add("mine", paths["sql"])


async def test_a_failed_replacement_leaves_the_old_one(ranks: LocalRanks, paths: dict[str, str]) -> None:
    manager = await start(ranks)
    first = await manager.add("mine", paths["sql"])
    with pytest.raises(InvalidRequestError):
        await manager.add("mine", "/no/such", load_inplace=True)
    assert manager.find("mine") == first
    assert ranks.names() == {R0: ["mine"], R1: ["mine"]}


async def test_pins_are_refused_alike_and_kept_nowhere(ranks: LocalRanks, paths: dict[str, str]) -> None:
    manager = await start(ranks)
    for i, path in enumerate([*paths.values(), str(Path(paths["sql"]).parent)]):
        await manager.add(str(i), path)
    await manager.pin("0")
    await manager.pin("1")
    with pytest.raises(InvalidRequestError, match=r"rank 0 .*cannot be pinned"):
        await manager.pin("2")
    assert [adapter.is_pinned for adapter in manager.adapters()] == [True, True, False]
    with pytest.raises(InvalidRequestError, match="'3' cannot be found"):
        await manager.pin("3")


async def test_a_change_goes_on_when_its_caller_leaves(ranks: LocalRanks, paths: dict[str, str]) -> None:
    manager = await start(ranks)
    ranks.hangs_at = "stage_lora"
    adding = asyncio.create_task(manager.add("sql", paths["sql"]))
    while (1, "stage_lora") not in ranks.calls:
        await asyncio.sleep(0)
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    ranks.go_on.set()
    await manager.add("chat", paths["chat"])
    assert ranks.names() == {R0: ["sql", "chat"], R1: ["sql", "chat"]}


async def test_a_rank_that_never_answers_fails_the_call_in_time(ranks: LocalRanks, paths: dict[str, str]) -> None:
    manager = await start(ranks, timeout_s=0.05)
    ranks.hangs_at = "stage_lora"
    with pytest.raises(EngineGenerateError, match=r"'sql' was not loaded: no answer from every rank within 0.05 s"):
        await manager.add("sql", paths["sql"])
    assert ranks.num_held() == [0, 0]


async def test_a_rank_that_restarts_has_the_time_of_a_start_for_its_adapters_and_not_that_of_a_change(
    ranks: LocalRanks, paths: dict[str, str]
) -> None:
    manager = await start(ranks, timeout_s=0.0)
    await manager.restore(R1, 600.0)
    assert ranks.timeouts["sync_loras"] == 600.0


async def test_a_change_that_waits_for_another_says_so_and_does_not_blame_a_rank(
    ranks: LocalRanks, paths: dict[str, str], tmp_path: Path
) -> None:
    manager = await start(ranks, SharedLoraStore(tmp_path / "loras.json"), timeout_s=0.05)
    async with SharedLoraStore(tmp_path / "loras.json").locked():
        with pytest.raises(EngineGenerateError, match=r"'sql' was not loaded: another change of the adapters has not ended"):
            await manager.add("sql", paths["sql"])
    assert (0, "stage_lora") not in ranks.calls


async def test_a_rank_that_restarts_gets_its_adapters_although_a_stopped_front_end_holds_the_lock(
    ranks: LocalRanks, paths: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "loras.json"
    store: LoraStore = SharedValue(path, dict[str, LoraAdapter], lock_timeout_s=0.02)
    manager = await start(ranks, store)
    await manager.add("sql", paths["sql"])
    ranks.start(RankId(1, 2))
    async with SharedLoraStore(path).locked():
        await manager.restore(RankId(1, 2), 600.0)
        await (LoraManager(ranks, store, ("base",), is_enabled=True)).adopt()  # nor does a front end that starts again wait
    assert ranks.names()[RankId(1, 2)] == ["sql"]
    assert "rank 1 (epoch 2) gets its adapters as the group is now: another change of loras has not ended" in caplog.text


async def test_the_first_front_end_learns_what_ranks_began_with_and_others_follow(
    ranks: LocalRanks, paths: dict[str, str], tmp_path: Path
) -> None:
    for core in ranks.cores.values():
        core.loras.load_modules((f"sql={paths['sql']}",))
    managers = [await start(ranks, SharedLoraStore(tmp_path / "loras.json")) for _ in range(2)]
    assert [adapter.path for adapter in managers[0].adapters()] == [paths["sql"]]
    await managers[1].add("chat", paths["chat"])
    await managers[0].remove("sql")
    assert managers[0].adapters() == managers[1].adapters() == [managers[0].find("chat")]
    ranks.cores[R0].loras.stage_lora(paths["sql"])  # a third one died in the middle of a change
    again = await start(ranks, SharedLoraStore(tmp_path / "loras.json"))
    assert again.adapters() == managers[0].adapters()
    assert ranks.num_held() == [1, 1]


async def test_names_of_the_model_and_servers_without_lora_are_refused(ranks: LocalRanks, paths: dict[str, str]) -> None:
    manager = await start(ranks)
    for name, message in (("base", "'base' is a name of the model itself"), ("", "must not be empty")):
        with pytest.raises(InvalidRequestError, match=message):
            await manager.add(name, paths["sql"])
    disabled = await start(ranks, is_enabled=False)
    for change in (disabled.add("sql", paths["sql"]), disabled.remove("sql"), disabled.pin("sql")):
        with pytest.raises(InvalidRequestError, match="start it with --enable-lora"):
            await change
    assert disabled.adapters() == []
    assert disabled.statuses(dict) == ()
    ranks.cores.clear()
    with pytest.raises(OverloadedError):
        await manager.add("sql", paths["sql"])


async def test_a_removed_adapter_is_shown_as_long_as_requests_use_it(ranks: LocalRanks, paths: dict[str, str]) -> None:
    manager = await start(ranks)
    await manager.add("sql", paths["sql"])
    statuses = manager.statuses(lambda: {"gone": (1, 2)})
    assert [(s.name, s.waiting, s.running) for s in statuses] == [("sql", 0, 0), ("gone", 1, 2)]
