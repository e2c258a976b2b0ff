"""systemd understands the units that we ship, and our command line the commands in them."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.cli import serve

pytestmark = pytest.mark.system

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
each_unit = pytest.mark.parametrize("name", ["gateway.service", "gateway@.service"])


@each_unit
def test_systemd_finds_nothing_wrong_with_a_unit(name: str, program: Callable[[str], str], tmp_path: Path) -> None:
    unit = tmp_path / name.replace("@", "@0")
    unit.write_text((CONFIGS / name).read_text().replace("/opt/gateway/bin/gateway", "/bin/true"))  # it must be there
    command = [program("systemd-analyze"), "verify", "--man=no", str(unit)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@each_unit
def test_the_command_of_a_unit_is_one_of_ours_and_may_drain_before_it_is_killed(name: str, tmp_path: Path) -> None:
    text = (CONFIGS / name).read_text()
    settings = dict(re.findall(r"^(\w+)=(.*)$", text, flags=re.MULTILINE))
    (tmp_path / "serve.yaml").write_text("model: some-model\n")
    command = settings["ExecStart"].replace("/etc/gateway", str(tmp_path)).replace("%i", "3")
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    config = serve.configuration(vars(parser.parse_args(shlex.split(command)[1:])), {})
    assert config.server.port == (8003 if "@" in name else 8000)
    assert float(settings["TimeoutStopSec"]) > config.server.shutdown_timeout + 30  # and to end what it has started
    assert float(settings["TimeoutStartSec"]) > config.fault.engine_ready_timeout
