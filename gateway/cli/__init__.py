"""The subcommands of `gateway`: thin shells that parse, call one function and print.

A subcommand is a module here with `add_parser(subparsers)` and `run(args) -> int`, and a line in `COMMANDS`. Only the one that
is asked for is imported.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from cores.config import did_you_mean
from gateway.cli import vllm_flags
from gateway.exit_codes import EXIT_NO_READER, EXIT_USAGE

COMMANDS = {
    "serve": "serve a model: an OpenAI-compatible endpoint over one or more engine cores",
    "status": "show how a running endpoint and its ranks are",
    "ranks": "drain, undrain or restart ranks of a running endpoint, or change their number",
    "bench": "put load on an endpoint and measure it",
    "simulate": "load balancing policies on a trace, in virtual time",
    "models": "the models that have a name: list, pull, path",
}


class Parser(argparse.ArgumentParser):
    """Says one line on bad usage, and takes no abbreviated flags: a later flag could change what they mean."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_dashes(word) for word in words], namespace)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def main(argv: Sequence[str] | None = None) -> int:
    """`gateway … | head -1` ends without a traceback, as other programs do."""
    try:
        try:
            return _main(argv)
        finally:
            print(end="", flush=True)  # here, and not at exit, where nobody could catch it
    except BrokenPipeError:
        if not _has_no_reader():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes stdout at exit
        return EXIT_NO_READER


def _has_no_reader() -> bool:
    """Stdout is a pipe whose other end is closed: the error may have been a socket's."""
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)  # errors are told in any case
    return bool(poller.poll(0))


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog="gateway", description="A data-parallel gateway for language models.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    command = words[0] if words else ""
    if command in COMMANDS:
        importlib.import_module(f"gateway.cli.{command}").add_parser(subparsers)
    else:
        for name, text in COMMANDS.items():
            subparsers.add_parser(name, help=text)
    if command and not command.startswith("-") and command not in COMMANDS:
        parser.error(f"unknown command {command!r}{did_you_mean(command, COMMANDS)}")
    args, unknown = parser.parse_known_args(words)
    if args.version:
        from gateway.version import __version__

        print(__version__)
        return 0
    chosen = subparsers.choices.get(command, parser)
    if unknown:
        chosen.error(_describe_unknown(unknown[0], chosen))
    if "run" not in args:
        parser.error(f"a command is missing: one of {', '.join(COMMANDS)}")
    return int(args.run(args))


def _with_dashes(word: str) -> str:
    """Flags may be written with underscores, as keys in a file and as vLLM's."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _describe_unknown(word: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r}"
    flag = word.partition("=")[0]
    if parser.prog.endswith(" serve") and (reason := vllm_flags.explain(flag)) is not None:
        return reason
    return f"unknown flag {flag}{did_you_mean(flag, parser._option_string_actions)}"
