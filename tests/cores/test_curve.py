from __future__ import annotations

from pathlib import Path

import pytest

from cores.config import UNIX_SOCKETS, ConfigError, Transport
from cores.curve import GroupKey


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_one_secret_makes_one_pair_wherever_it_is_read(tmp_path: Path) -> None:
    first = GroupKey.read(write(tmp_path / "a", "s" * 32))
    assert first == GroupKey.read(write(tmp_path / "b", "s" * 32 + "\n"))
    assert first != GroupKey.read(write(tmp_path / "c", "t" * 32))
    assert first.secret.decode() not in repr(first)


def test_a_key_that_was_made_crosses_to_a_child_and_no_two_are_alike() -> None:
    made = GroupKey.make()
    assert GroupKey.of(Transport(host="10.0.0.1", curve_secret=made.secret.decode())) == made
    assert made != GroupKey.make()
    assert GroupKey.of(UNIX_SOCKETS) is None


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("s" * 32, 0o640, "others than its owner may read"),
        ("s" * 31, 0o600, "must hold a secret of at least 32 characters, got 31"),
        (None, 0, "cannot read .*: No such file or directory"),
    ],
)
def test_a_file_that_is_no_secret_is_refused(tmp_path: Path, text: str | None, mode: int, message: str) -> None:
    path = str(tmp_path / "key") if text is None else write(tmp_path / "key", text, mode)
    with pytest.raises(ConfigError, match=f"--data-parallel-key-file: .*{message}|--data-parallel-key-file: {message}"):
        GroupKey.read(path)
