"""What is missing between two numbers is seen once; what is merely new is not missed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cores.codec import CodecError
from cores.gaps import CommandGaps, OutputGaps, numbered, seq_before_life, split_number
from cores.messages import RankId


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), max_size=9))
def test_commands_in_order_have_no_gap_over_any_lives_of_a_front_end(lives: list[tuple[int, int]]) -> None:
    gaps, life = CommandGaps(), 0
    for step, num_commands in lives:
        life += step
        assert [gaps.num_lost_before(seq_before_life(life) + i) for i in range(1, num_commands + 1)] == [0] * num_commands


def test_lost_commands_are_counted_also_the_first_ones_of_a_life() -> None:
    gaps, start = CommandGaps(), seq_before_life(3)
    assert gaps.num_lost_before(start + 3) == 2
    assert gaps.num_lost_before(start + 4) == 0
    assert gaps.num_lost_before(start + 9) == 4
    assert gaps.num_lost_before(start + 9) == -1  # twice
    assert gaps.num_lost_before(seq_before_life(4) + 2) == 1


def test_outputs_are_counted_for_each_life_of_each_rank() -> None:
    gaps = OutputGaps()
    one, two, later = RankId(1, 1), RankId(2, 1), RankId(1, 2)
    seen = [gaps.num_lost_before(*pair) for pair in ((one, 1), (two, 1), (one, 2), (two, 4), (later, 1), (one, 9), (later, 2))]
    assert seen == [0, 0, 0, 2, 0, 0, 0]


def test_a_frame_and_its_number_come_apart_as_they_went_in() -> None:
    assert split_number(numbered(77, b"frame")) == (77, b"frame")


@pytest.mark.parametrize("frames", [[], [b"frame"], [b"7", b"frame"], [bytes(8), b"frame", b""]])
def test_what_has_no_number_is_malformed(frames: list[bytes]) -> None:
    with pytest.raises(CodecError, match="expected a number of 8 bytes and a message, got"):
        split_number(frames)
