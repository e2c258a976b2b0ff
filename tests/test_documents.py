"""What the documents say of tests, files and flags: each that is named is there, and each flag that is there is named."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
from pathlib import Path

import pytest

from cores.config import SimulatedConfig
from cores.launch.leftovers import OWNER_VARIABLE
from cores.messages import RankId
from cores.runner.faults import ACTIONS, FaultScript
from gateway.cli import Parser, bench, main, serve
from gateway.cli.settings import ENVIRONMENT
from scripts.status_picture import draw_scenes

ROOT = Path(__file__).resolve().parents[1]
FOR_USERS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = ["ARCHITECTURE.md", "THREAT_MODEL.md", "docs/acceptance.md"]
ALL = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("balancer/**/*.md")]
_LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
_FILE = re.compile(r"(?<![\w/.])(?:\./)?((?:balancer|configs|cores|docs|examples|gateway|scripts|tests)/[\w./-]*\w)")
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_test_that_a_document_names_exists(document: str) -> None:
    named = _TEST.findall((ROOT / document).read_text())
    assert named
    for path, name in named:
        assert (ROOT / path).is_file(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


@pytest.mark.parametrize("document", [path.relative_to(ROOT) for path in ALL], ids=str)
def test_every_file_that_a_document_names_or_links_to_exists(document: Path) -> None:
    text = (ROOT / document).read_text()
    links = [link for link in _LINK.findall(text) if "://" not in link]
    assert [link for link in links if not (ROOT / document.parent / link).exists()] == []
    assert [path for path in _FILE.findall(text) if not any(ROOT.glob(f"{path.rstrip('/')}*"))] == []


def test_every_failure_has_its_test() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("## Death and doubt")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 10
    assert [row.split("|")[1].strip() for row in rows if not _TEST.search(row.rsplit("|", 2)[1])] == []


@pytest.mark.parametrize("command", [serve, bench])
def test_every_flag_is_in_a_document_for_users(command: object) -> None:
    named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", "\n".join(path.read_text() for path in FOR_USERS)))
    subparsers = Parser(prog="gateway").add_subparsers(parser_class=Parser)
    command.add_parser(subparsers)  # type: ignore[attr-defined]
    (parser,) = subparsers.choices.values()
    flags = [action for action in parser._actions if action.option_strings and not isinstance(action, argparse._HelpAction)]
    assert len(flags) > 10
    assert [action.option_strings[0] for action in flags if named.isdisjoint(action.option_strings)] == []


def test_every_key_of_the_simulated_engine_and_every_fault_is_in_the_document_that_its_help_names() -> None:
    text = (ROOT / "docs/tuning.md").read_text().partition("### The simulated engine")[2].partition("\n## ")[0]
    keys = [field.name for field in dataclasses.fields(SimulatedConfig)]
    assert [name for name in keys if f"`{name}`" not in text] == []
    assert [action for action in ACTIONS if f"`{action}=N`" not in text] == []
    (script,) = re.findall(r'"fault=([^"]*)"', text)
    first, second = (FaultScript.parse(script, RankId(rank, 1)) for rank in (0, 1))
    assert (first.steps, second.steps) == ({}, {40: "die"})
    assert first.failing_tokens.hits(7, 5)


def test_the_traces_that_the_document_shows_can_be_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/balancing.md").read_text().partition("### A trace of your own")[2].partition("\n## ")[0]
    summaries = {}
    for kind, lines in re.findall(r"```(json|csv)\n(.*?)```", text, re.DOTALL):
        (tmp_path / kind).write_text(lines)
        assert main(["simulate", "--trace", str(tmp_path / kind), "--ranks", "1", "--json"]) == 0
        (summaries[kind],) = json.loads(capsys.readouterr().out)
    assert (summaries["json"]["requests"], summaries["csv"]["requests"]) == (3, 2)
    assert summaries["json"]["prefix_hit_rate"] == pytest.approx((1024 + 1024) / (1200 + 1300 + 1800))


def test_every_environment_variable_is_in_the_list_and_in_the_help_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/tuning.md").read_text().partition("## Environment variables")[2]
    assert {name: f"--{key}" for name, key in ENVIRONMENT.items()} == dict(re.findall(r"\| `([A-Z_]+)` \| `(--[a-z-]+)`", text))
    sources = [path.read_text() for package in ("gateway", "cores", "balancer") for path in (ROOT / package).rglob("*.py")]
    named = set(re.findall(r"\bGATEWAY_[A-Z_]+\b", "\n".join(sources)))
    assert named - {OWNER_VARIABLE} == {name for name in ENVIRONMENT if name.startswith("GATEWAY_")}
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert [name for name in ENVIRONMENT if name not in shown] == []


def test_asking_the_test_script_for_help_sets_nothing_up() -> None:
    asked = ["env", "PYTHON=/nowhere/python", str(ROOT / "scripts/test"), "tests/cores", "--help"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
    assert "tests/cores tests/gateway tests/balancer" in done.stdout
    assert done.stderr == ""


def test_the_pictures_of_the_board_are_of_the_board_as_it_is(tmp_path: Path) -> None:
    draw_scenes(tmp_path)
    drawn, kept = ({path.name: path.read_text() for path in where.glob("*.svg")} for where in (tmp_path, ROOT / "docs/screens"))
    others = sorted(name for name in drawn | kept if drawn.get(name) != kept.get(name))
    assert others == [], "draw them with `python -m scripts.status_picture docs/screens`"
