"""`gateway models list | pull NAME | path NAME`."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

from cores.config import ConfigError
from gateway.models import CATALOGUE, ModelError, is_pulled, model_path, pull_model


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser("models", help="the models that have a name: list, pull, path")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="print the known models and which are on this machine")
    for action, text in (("pull", "download and convert a model, once"), ("path", "print the directory of a pulled model")):
        actions.add_parser(action, help=text).add_argument(
            "name", metavar="NAME", choices=list(CATALOGUE), help="one of: %(choices)s"
        )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        return {"list": _list, "pull": _pull, "path": _path}[args.action](args)
    except (ConfigError, ModelError) as error:
        print(f"gateway models: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _list(args: argparse.Namespace) -> int:
    for source in CATALOGUE.values():
        state = "pulled" if is_pulled(source.name) else "not pulled"
        print(f"{source.name:<18} {state:<12} {source.description}")
    return 0


def _pull(args: argparse.Namespace) -> int:
    # SIGTERM as an exception: the clean-up of a half-done pull then runs as it does for Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(pull_model(args.name, report=lambda line: print(line, file=sys.stderr, flush=True)))
    return 0


def _path(args: argparse.Namespace) -> int:
    print(model_path(args.name))
    return 0
