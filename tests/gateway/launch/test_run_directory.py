from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cores.launch.leftovers import OWNER_VARIABLE
from gateway.launch.run_directory import RunDirectory, RunDirectoryError

DEADLINE_S = 60.0


@pytest.fixture
def parent() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as name:
        yield Path(name)


def test_is_private_and_gone_afterwards_with_all_that_is_in_it(parent: Path) -> None:
    with RunDirectory(parent) as run:
        assert run.path.stat().st_mode & 0o777 == 0o700
        (run.path / "sub").mkdir()
        (run.path / "sub" / "file").write_text("x")
    assert list(parent.iterdir()) == []


def test_is_gone_after_an_exception_too(parent: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunDirectory(parent):
        raise ZeroDivisionError
    assert list(parent.iterdir()) == []


def test_default_place_leaves_room_for_socket_paths() -> None:
    with RunDirectory() as run:
        assert len(bytes(run.path)) <= 40


def test_directory_of_a_killed_run_is_removed_and_that_of_a_living_one_is_kept(parent: Path) -> None:
    abandoned = parent / "gateway-abandoned"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    with RunDirectory(parent) as living:
        assert not abandoned.exists()
        with RunDirectory(parent) as other:
            assert living.path.exists()
            assert other.path != living.path


def test_a_process_that_a_killed_run_has_left_is_ended_with_its_directory_and_a_living_runs_is_not(parent: Path) -> None:
    def start(owner: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={OWNER_VARIABLE: str(owner / "ray")}
        )

    abandoned = parent / "gateway-abandoned"
    with RunDirectory(parent) as living, start(living.path) as kept, start(abandoned) as orphan:
        abandoned.mkdir()
        (abandoned / "lock").touch()
        with RunDirectory(parent):
            assert orphan.wait(DEADLINE_S) == -signal.SIGKILL
        assert not abandoned.exists()
        assert kept.poll() is None
        kept.kill()


def test_directory_in_which_a_dying_process_still_makes_files_is_left_for_the_next_run(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned = parent / "gateway-abandoned"
    (abandoned / "ray").mkdir(parents=True)
    (abandoned / "lock").touch()
    with monkeypatch.context() as patch:
        patch.setattr("gateway.launch.run_directory.shutil.rmtree", lambda path, **_: None)  # as if it were made again at once
        with RunDirectory(parent):
            assert (abandoned / "lock").exists()
    with RunDirectory(parent):
        assert not abandoned.exists()


def test_directories_that_are_not_ours_are_kept(parent: Path) -> None:
    others = parent / "gateway-of-somebody"
    others.mkdir()
    with RunDirectory(parent):
        assert others.exists()


def test_place_where_no_directory_can_be_made_is_one_clear_line() -> None:
    with pytest.raises(RunDirectoryError, match=r"cannot make a directory for sockets: .*'/proc/"), RunDirectory(Path("/proc")):
        pass
