"""A command that nothing follows is asked for; commands that are seen in their time are not."""

from __future__ import annotations

from gateway.core_client.commands_seen import ASK_AFTER_S, CommandsSeen


def test_an_unseen_command_is_asked_for_once_in_a_while_until_it_is_seen() -> None:
    seen = CommandsSeen(7)
    times = [i * ASK_AFTER_S / 4 for i in range(20)]
    assert [now for now in times if seen.is_time_to_ask(8, now)] == times[4::4]
    seen.on_report(8)
    assert not any(seen.is_time_to_ask(8, 100.0 + now) for now in times)


def test_a_steady_flow_of_commands_is_never_asked_for_though_the_last_one_is_never_seen_yet() -> None:
    seen = CommandsSeen(0)
    for step in range(100):
        seen.on_report(step - 1)
        assert not seen.is_time_to_ask(step, step * ASK_AFTER_S * 0.9)
