"""What is made of Ray's paragraphs."""

from __future__ import annotations

from cores.launch.ray_summary import MAX_SUMMARY, summary

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: EngineCoreActor
\tactor_id: 1fd6ffb1d4a0c0aa53ae3b8501000000
\tpid: 4711
\tnamespace: 3e0d
\tip: 10.77.0.2
"""


def test_the_cause_of_death_is_one_plain_line() -> None:
    lost = DIED + "The actor is dead because its node has died. Node Id: 8f\n\tthe actor's node was terminated: no heartbeat"
    assert summary(lost) == (
        "The actor is dead because its node has died. Node Id: 8f the actor's node was terminated: no heartbeat"
    )


def test_the_detail_of_a_worker_is_all_that_is_told_without_the_guesses() -> None:
    text = DIED + "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
    guesses = " Some common causes include: (1) the OOM killer"
    assert summary(text + "Worker was killed by Ray as its node ran low on memory." + guesses) == (
        "Worker was killed by Ray as its node ran low on memory."
    )
    assert summary(text + "Worker unexpectedly exits with a connection error code 2. End of file." + guesses) == ""


def test_a_traceback_is_cut_and_shows_that_it_is() -> None:
    text = "RuntimeError: no\n" + "  File x, line 1, in y\n" * 100
    assert summary(text).startswith("RuntimeError: no File x")
    assert summary(text).endswith(" …")
    assert len(summary(text)) <= MAX_SUMMARY + 2
