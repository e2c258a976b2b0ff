"""What is remembered of a rank over its lives."""

from __future__ import annotations

from balancer.rank_health import RankHealth
from cores.messages import RankId, SchedulerStats
from gateway.core_client.rank import MAX_RATE_AGE_S, Rank, RankLife, RateMeter
from gateway.status import NUM_LIVES_KEPT, Lives


def make_life(epoch: int) -> RankLife:
    rank_id = RankId(3, epoch)
    return RankLife(rank_id, RankHealth(rank_id, now=0.0))


def nobody_else(number: int) -> Lives:
    return Lives()


def test_counters_never_go_back_over_a_restart() -> None:
    rank = Rank(make_life(1))
    rank.on_stats(SchedulerStats(num_generation_tokens=100, num_prompt_tokens=7), now=1.0)
    rank.on_death("killed", now=2.0)
    rank.begin_life(make_life(2), nobody_else)
    status = rank.status(now=2.5, ledger_tokens=0)
    assert (status.deaths, status.generation_tokens) == (1, 100)
    rank.on_stats(SchedulerStats(num_generation_tokens=5, num_prompt_tokens=1), now=3.0)
    status = rank.status(now=3.5, ledger_tokens=0)
    assert (status.deaths, status.generation_tokens, status.prompt_tokens) == (1, 105, 8)


def test_a_rank_that_is_restarted_for_months_costs_no_more_memory_and_loses_no_count() -> None:
    rank = Rank(make_life(1))
    for epoch in range(2, 102):
        rank.on_stats(SchedulerStats(num_generation_tokens=epoch), now=float(epoch))
        rank.on_death("killed", now=epoch + 0.5)
        rank.begin_life(make_life(epoch), nobody_else)
        assert len(rank.lives.by_epoch) <= NUM_LIVES_KEPT + 1
        status = rank.status(now=epoch + 0.6, ledger_tokens=0)
        assert (status.deaths, status.generation_tokens) == (epoch - 1, sum(range(2, epoch + 1)))


def test_status_of_a_dead_rank_shows_its_cause_and_no_stale_load() -> None:
    rank = Rank(make_life(1))
    rank.life.health.on_ready(0.0)
    rank.life.health.on_dead(5.0, "killed by signal 9")
    rank.on_death("killed by signal 9", now=5.0)
    status = rank.status(now=7.5, ledger_tokens=0)
    assert (status.state, status.death_cause, status.last_death_s_ago) == ("dead", "killed by signal 9", 2.5)
    assert status.signal_age_ms is None


def test_rate_is_of_the_last_interval_and_starts_anew_when_the_counter_does() -> None:
    meter = RateMeter()
    meter.read(0, 0.0)
    meter.read(50, 0.5)
    assert meter.per_s == 100.0
    meter.read(60, 0.6)  # too soon to say
    assert meter.per_s == 100.0
    meter.read(3, 1.2)
    assert meter.per_s == 0.0


def test_a_rank_that_has_fallen_silent_shows_no_tokens_per_second() -> None:
    rank = Rank(make_life(1))
    rank.on_stats(SchedulerStats(), now=1.0)
    rank.on_stats(SchedulerStats(num_generation_tokens=100, num_prompt_tokens=50), now=2.0)
    for now, generated, prompt in ((2.5, 100.0, 50.0), (2.0 + MAX_RATE_AGE_S + 0.1, 0.0, 0.0)):
        status = rank.status(now, ledger_tokens=0)
        assert (status.generation_tokens_per_s, status.prompt_tokens_per_s) == (generated, prompt)
