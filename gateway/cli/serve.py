"""`gateway serve [MODEL] [--config FILE.yaml] …`: flags, file and environment become one configuration for the launcher."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

from cores.config import ConfigError, SimulatedConfig, to_plain
from gateway.cli.settings import ENVIRONMENT, Settings, Values, add_flags
from gateway.cli.vllm_flags import add_harmless
from gateway.config import GatewayConfig
from gateway.exit_codes import EXIT_USAGE

DESCRIPTION = f"""Serves MODEL over HTTP. A flag beats the file, and the file beats the environment, where these few variables
stand for flags (docs/tuning.md): {", ".join(ENVIRONMENT)}."""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model: an OpenAI-compatible endpoint over one or more engine cores",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="Hugging Face style directory, or a name that `gateway models list` shows",
    )
    parser.add_argument("--config", metavar="FILE", default=None, help="YAML file with the same keys as the flags")
    parser.add_argument("--model", dest="model", default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # as vLLM's images take it
    add_flags(parser, Settings())
    add_harmless(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        config = configuration(vars(args), os.environ)
    except ConfigError as error:
        print(f"gateway serve: {error}", file=sys.stderr)
        return EXIT_USAGE
    if config.parallel.data_parallel_multi_port_external_lb:
        from gateway.launch.multi_port import supervise

        return supervise(config)
    from gateway.launch.serve import serve

    return serve(config)


def configuration(given: Mapping[str, Any], environment: Mapping[str, str]) -> GatewayConfig:
    """From parsed flags (by key), the file that they name, and the environment. Raises `ConfigError`."""
    settings = Settings()
    path = given.get("config")
    from_file = {} if path is None else settings.from_mapping(_read_yaml(path), path)
    from_flags = _from_flags(settings, given)
    config = settings.build(settings.from_environment(environment), from_file, from_flags)
    if "simulated" in {*from_file, *from_flags} and config.engine.engine != "simulated":
        raise ConfigError(f"--simulated needs --engine simulated, got --engine {config.engine.engine}")
    if not config.engine.model:
        raise ConfigError("MODEL is missing: give a directory or a name, here or as `model` in the --config file")
    return config


def _from_flags(settings: Settings, given: Mapping[str, Any]) -> Values:
    values: Values = {}
    for setting in settings.all:
        if setting.key in given:
            value = given[setting.key]
            values[setting.key] = to_plain(SimulatedConfig.parse(value)) if setting.hint is SimulatedConfig else value
    return values


def _read_yaml(path: str) -> dict[Any, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            document = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"--config {path} must hold keys and values, got a {type(document).__name__}")
    return document
