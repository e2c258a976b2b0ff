"""What others do, to compare with: written from their documentation and threads, for the simulation alone."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import ClassVar

from balancer.ledger import LoadLedger
from balancer.load import RankView, RoutingRequest
from balancer.policy import Choice, Rotation
from balancer.simulation.front_end import SimulatedRoutingRequest
from cores.block_hash import BlockHash, BlockKey
from cores.messages import RankId, RankLoad


class SnapshotLedger(LoadLedger):
    """Counts as vLLM 0.33's front ends keep them: a published snapshot replaces whatever was counted since the last one.

    Only the front end's own requests in flight are exact. Between two snapshots a dispatch counts as `bump` waiting requests.
    """

    def __init__(self, bump: int) -> None:
        super().__init__()
        self._bump = bump
        self._bumps: dict[RankId, int] = {}
        self._snapshots: dict[RankId, RankLoad] = {}

    def book(self, handle: int, rank_id: RankId, num_prompt_tokens: int, block_keys: Sequence[BlockKey] = ()) -> None:
        super().book(handle, rank_id, num_prompt_tokens, block_keys)
        self._bumps[rank_id] = self._bumps.get(rank_id, 0) + self._bump

    def on_report(self, rank_id: RankId, step: int, command_seq: int, load: RankLoad, now: float) -> bool:
        self._bumps[rank_id] = 0
        self._snapshots[rank_id] = load
        return super().on_report(rank_id, step, command_seq, load, now)

    def view(self, rank_id: RankId) -> RankView:
        return self._as_published(super().view(rank_id))

    def views(self, rank_ids: Collection[RankId]) -> Sequence[RankView]:
        return [self._as_published(view) for view in super().views(rank_ids)]

    def _as_published(self, view: RankView) -> RankView:
        load = self._snapshots.get(view.rank_id, RankLoad())
        return dataclasses.replace(
            view,
            num_waiting=load.num_waiting + self._bumps.get(view.rank_id, 0),
            num_running=load.num_running,
            num_prefill_tokens=load.num_prefill_tokens,
            num_decodes=load.num_decodes,
        )


class SglangCacheAware:
    """SGLang's cache-aware rule: the longest match in the router's own record of what it sent where, while counts are near.

    Of requests in flight, a spread above 64 and of more than 1.5 times sends to the shortest queue. Otherwise a match of at
    least 30 % of the prompt decides, and else the rank of which the record holds least: the most room for new prefixes.
    """

    name: ClassVar[str] = "sglang"
    match_threshold = 0.3
    abs_threshold, rel_threshold = 64, 1.5
    max_blocks = 1 << 14  # 2^25 characters, at about four to a token and 512 tokens to a block

    def __init__(self, rng: random.Random) -> None:
        self._rotation = Rotation(rng)
        self._records: dict[RankId, OrderedDict[BlockHash, None]] = {}

    def choose(self, request: RoutingRequest, ranks: Sequence[RankView], now: float) -> Choice:
        assert isinstance(request, SimulatedRoutingRequest)
        hashes = request.request.prompt_hashes
        records = [self._records.setdefault(view.rank_id, OrderedDict()) for view in ranks]
        index, reason = self._pick(hashes, [view.own_in_flight for view in ranks], records)
        self._remember(records[index], hashes)
        return Choice(ranks[index].rank_id, reason)

    def _pick(
        self, hashes: Sequence[BlockHash], counts: Sequence[int], records: Sequence[OrderedDict[BlockHash, None]]
    ) -> tuple[int, str]:
        most, least = max(counts), min(counts)
        if most - least > self.abs_threshold and most > self.rel_threshold * least:
            return self._rotation.pick_least(counts), "shortest_queue"
        matches = [num_leading(hashes, record) for record in records]
        if hashes and max(matches) > self.match_threshold * len(hashes):
            return self._rotation.pick_least([-match for match in matches]), "match"
        return self._rotation.pick_least([len(record) for record in records]), "smallest_record"

    def _remember(self, record: OrderedDict[BlockHash, None], hashes: Sequence[BlockHash]) -> None:
        for block_hash in reversed(hashes):  # the first block is the last to be forgotten
            record[block_hash] = None
            record.move_to_end(block_hash)
        while len(record) > self.max_blocks:
            record.popitem(last=False)


def num_leading(hashes: Sequence[BlockHash], known: OrderedDict[BlockHash, None]) -> int:
    for index, block_hash in enumerate(hashes):
        if block_hash not in known:
            return index
    return len(hashes)
