"""The configuration's fields as settings: each has one name as a flag, as a YAML key, and maybe as an environment variable.

Flags, help, defaults and checks all come from the dataclasses: a new field needs no line here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cores.config import ConfigError, SimulatedConfig, did_you_mean, from_plain, to_plain
from gateway.cli import vllm_flags
from gateway.config import GatewayConfig

ENVIRONMENT = {
    "GATEWAY_API_KEY": "api-key",
    "GATEWAY_DP_KEY_FILE": "data-parallel-key-file",
    "GATEWAY_OUTPUT_PROC_CHUNK_SIZE": "output-chunk-size",
    "GATEWAY_KEEP_ALIVE_ON_ENGINE_DEATH": "keep-alive-on-engine-death",
    "GATEWAY_ENGINE_READY_TIMEOUT_S": "engine-ready-timeout",
    "GATEWAY_SERVER_DEV_MODE": "dev-mode",
    "RAY_ADDRESS": "ray-address",
}

_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Setting:
    """One field. `key` is its name with dashes."""

    section: str  # the field of `GatewayConfig` that holds it; empty: `GatewayConfig` itself
    field: str
    hint: Any  # without its `| None`
    default: Any
    metadata: Mapping[str, Any]

    @property
    def key(self) -> str:
        return self.field.replace("_", "-")

    @property
    def flag(self) -> str:
        return f"--{self.key}"

    @property
    def aliases(self) -> tuple[str, ...]:
        return tuple(self.metadata.get("aliases", ()))

    @property
    def help(self) -> str:
        """Explanation, unit and default, as `--help` shows them."""
        text = str(self.metadata.get("help", "")).replace("%", "%%")
        unit = f", in {self.metadata['unit']}" if "unit" in self.metadata else ""
        shown = self.default not in (None, (), "")
        return f"{text}{unit}" + (f" (default: {_shown(self.default)})" if shown else "")

    def from_text(self, text: str) -> Any:
        """The value that a flag or an environment variable means. Raises `ConfigError`."""
        text = self.metadata.get("spellings", {}).get(text, text)
        if self.metadata.get("suffixes"):
            return _number(text)
        if self.hint is bool:
            if text.lower() not in _BOOLEANS:
                raise ConfigError(f"must be one of {', '.join(_BOOLEANS)}, got {text!r}")
            return _BOOLEANS[text.lower()]
        try:
            return self.hint(text) if self.hint in (int, float) else text
        except ValueError:
            raise ConfigError(f"must be a {_KINDS[self.hint]}, got {text!r}") from None

    def from_yaml(self, value: Any) -> Any:
        """The value that a file holds, or `ConfigError`."""
        if value is None and self.default in (None, ()):
            return self.default
        if self.hint is SimulatedConfig:
            return to_plain(SimulatedConfig.parse(_simulated_words(value)))
        if get_origin(self.hint) is tuple:
            items = value if isinstance(value, list) else [value]
            return tuple(_checked(item, str) for item in items)
        if isinstance(value, dict) and self.metadata.get("json"):
            return json.dumps(value)
        if isinstance(value, str) and {"suffixes", "spellings"} & self.metadata.keys():
            return self.from_text(value)
        return _checked(value, str if get_origin(self.hint) is Literal else self.hint)


def _shown(default: Any) -> str:
    """As it would be typed."""
    if isinstance(default, SimulatedConfig):
        return " ".join(f"{key}={value:g}" for key, value in to_plain(default).items() if key != "fault")
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)


_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _number(text: str) -> int:
    """Whole, with vLLM's suffixes: 32k is 32,000 and 32K is 32,768. Raises `ConfigError`."""
    digits, factor = (text[:-1], _SUFFIXES[text[-1]]) if text[-1:] in _SUFFIXES else (text, 1)
    try:
        value = float(digits) * factor if "." in digits and factor % 10 == 0 else int(digits) * factor
    except ValueError:
        value = 0.5
    if value != int(value):
        raise ConfigError(f"must be a whole number, as 32768, 32k (32,000) or 32K (32,768), got {text!r}")
    return int(value)


_KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def _checked(value: Any, kind: type) -> Any:
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"must be a {_KINDS[kind]}, got {value!r}".replace("be a t", "be t"))
    return kind(value)


def _simulated_words(value: Any) -> list[str]:
    """`{step_ms: 5}`, `[step_ms=5]` and `step_ms=5` all mean the same."""
    if isinstance(value, dict):
        return [f"{key}={item}" for key, item in value.items()]
    return [str(item) for item in value] if isinstance(value, list) else str(value).split()


def all_settings() -> list[Setting]:
    hints = get_type_hints(GatewayConfig)
    settings = []
    for field in dataclasses.fields(GatewayConfig):
        if dataclasses.is_dataclass(hints[field.name]):
            settings += _settings_of(typing.cast(type, hints[field.name]), field.name)
        else:
            settings.append(_setting(field, hints, ""))
    return settings


def _settings_of(cls: type, section: str) -> list[Setting]:
    hints = get_type_hints(cls)
    return [_setting(field, hints, section) for field in dataclasses.fields(cls)]


def _setting(field: dataclasses.Field[Any], hints: Mapping[str, Any], section: str) -> Setting:
    hint = hints[field.name]
    if get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = [a for a in get_args(hint) if a is not type(None)]
    factory: Any = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    return Setting(section, field.name, hint, default, field.metadata)


Values = dict[str, Any]  # by key


class Settings:
    """All of them, by every name that they have."""

    def __init__(self) -> None:
        self.all = all_settings()
        self._by_key = {name: s for s in self.all for name in (s.key, *(a.lstrip("-") for a in s.aliases))}

    def from_environment(self, environment: Mapping[str, str]) -> Values:
        """Empty variables count as not set."""
        values: Values = {}
        for name, key in ENVIRONMENT.items():
            if text := environment.get(name, ""):
                setting = self._by_key[key]
                try:
                    value = setting.from_text(text)
                except ConfigError as error:
                    raise ConfigError(f"{name} {error}") from None
                values[setting.key] = (value,) if get_origin(setting.hint) is tuple else value
        return values

    def from_mapping(self, mapping: Mapping[Any, Any], where: str) -> Values:
        """Of a YAML file: keys as the flags, with dashes or underscores. Raises `ConfigError`."""
        values: Values = {}
        for written, value in mapping.items():
            key = str(written).replace("_", "-")
            negated = key.startswith("no-") and key not in self._by_key
            setting = self._by_key.get(key.removeprefix("no-") if negated else key)
            if setting is None and vllm_flags.is_known(key):
                _check_vllms(key, value, where)
                continue
            if setting is None or (negated and setting.hint is not bool):
                raise ConfigError(f"{where}: unknown key {str(written)!r}{did_you_mean(key, self._by_key)}")
            try:
                converted = setting.from_yaml(value)
            except ConfigError as error:
                raise ConfigError(f"{where}: {written} {str(error).removeprefix(f'{setting.flag} ')}") from None
            values[setting.key] = not converted if negated else converted
        return values

    def build(self, *layers: Values) -> GatewayConfig:
        """The configuration; later layers beat earlier ones. Raises `ConfigError`."""
        plain: dict[str, Any] = {}
        for key, value in (item for layer in layers for item in layer.items()):
            setting = self._by_key[key]
            place = plain.setdefault(setting.section, {}) if setting.section else plain
            place[setting.field] = value
        return from_plain(GatewayConfig, plain)


def _check_vllms(key: str, value: Any, where: str) -> None:
    try:
        vllm_flags.check(key, value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def add_flags(parser: argparse.ArgumentParser, settings: Settings) -> None:
    """One flag for each setting, grouped as the configuration is. Those not given are absent from the namespace."""
    titles = {"": "process", "engine": "engine cores", "server": "HTTP server", "parallel": "data parallelism"}
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in settings.all:
        if setting.field == "model":
            continue  # the one positional
        if setting.section not in groups:
            groups[setting.section] = parser.add_argument_group(titles.get(setting.section, setting.section))
        groups[setting.section].add_argument(
            setting.flag, *setting.aliases, dest=setting.key, default=argparse.SUPPRESS, help=setting.help, **_style(setting)
        )


# A flag that is given twice adds to the first: `--api-key A --api-key B` must not lock A out without a word.
_LIST: dict[str, Any] = {"nargs": "+", "action": "extend"}


def _style(setting: Setting) -> dict[str, Any]:
    if setting.hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if setting.hint is SimulatedConfig:
        return _LIST | {"metavar": "KEY=VALUE"}
    if get_origin(setting.hint) is tuple:
        return _LIST | {"metavar": setting.metadata.get("metavar", setting.field.rsplit("_", 1)[-1].upper())}
    choices = get_args(setting.hint) if get_origin(setting.hint) is Literal else ()
    metavar = "{" + ",".join(choices) + "}" if choices else {int: "N", float: "X"}.get(setting.hint, "TEXT")

    def convert(text: str) -> Any:
        try:
            return setting.from_text(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return {"type": convert, "metavar": metavar}
