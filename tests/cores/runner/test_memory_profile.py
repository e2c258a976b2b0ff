"""The largest step that a scheduler could make is what memory is measured with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cores.runner.interface import SchedulerOutput
from cores.runner.memory_profile import largest_batch, num_blocks_of
from tests.cores.runner.torch_engine import Engine


def lengths(batch: SchedulerOutput) -> list[int]:
    return [scheduled.num_tokens for scheduled in batch.scheduled]


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "max_model_len", "expected"),
    [
        (2048, 4, 4096, [512] * 4),
        (10, 4, 4096, [2, 3, 2, 3]),
        (3, 256, 4096, [1, 1, 1]),  # no more sequences than tokens
        (2048, 1, 1025, [1024, 1024]),  # longer than the model takes: more sequences than may run, but as many tokens
    ],
)
def test_it_uses_up_the_budget(num_tokens: int, num_seqs: int, max_model_len: int, expected: list[int]) -> None:
    batch = largest_batch(num_tokens, num_seqs, max_model_len, 16)
    assert lengths(batch) == expected
    assert batch.num_tokens == sum(lengths(batch)) == num_tokens
    assert all(scheduled.samples for scheduled in batch.scheduled)


def test_each_sequence_has_its_own_blocks() -> None:
    batch = largest_batch(100, 3, 4096, 16)
    block_ids = [block_id for scheduled in batch.scheduled for block_id in scheduled.request.block_ids]
    assert block_ids == list(range(num_blocks_of(batch)))
    assert num_blocks_of(batch) == 3 * 3  # 33, 33 and 34 tokens


def test_an_engine_can_run_it(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_num_seqs=7)
    batch = largest_batch(300, 7, 2048, engine.info.block_size)
    assert num_blocks_of(batch) <= engine.info.num_kv_blocks
    assert len(engine.runner.execute(batch).token_ids) == 7
