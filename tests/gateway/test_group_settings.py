"""What a rank that starts again is told, after whatever operators did."""

from __future__ import annotations

from gateway.group_settings import MEMORY_TAGS, GroupSettings

FRESH = GroupSettings()


def test_a_pause_lasts_until_it_is_resumed_whatever_sleeps_meanwhile() -> None:
    paused = FRESH.paused()
    assert paused.is_paused
    assert paused.slept(1).woken(None) == paused
    assert paused.resumed() == FRESH


def test_memory_wakes_up_by_tag() -> None:
    asleep = FRESH.slept(2)
    assert (asleep.asleep, asleep.sleep_level) == (MEMORY_TAGS, 2)
    assert asleep.woken(["weights"]).asleep == ("kv_cache",)
    assert asleep.woken(["weights"]).woken(["kv_cache"]).asleep == asleep.woken(None).asleep == ()


def test_dropped_weights_do_not_come_back_by_a_lighter_sleep() -> None:
    assert FRESH.slept(2).slept(1).sleep_level == 2
    assert FRESH.slept(1).slept(2).sleep_level == 2
    assert FRESH.slept(2).woken(["weights"]).slept(1).sleep_level == 1


def test_the_newest_weights_count() -> None:
    settings = FRESH.with_weights("/a", 1).paused().with_weights("/b", 7)
    assert (settings.weights_directory, settings.weight_version, settings.is_paused) == ("/b", 7, True)
