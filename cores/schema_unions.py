"""JSON schemas whose `oneOf` can be read as `anyOf`, because no value fits two of its branches. Pure.

llguidance takes a `oneOf` only if it sees that itself, and does not look through references or at numbers: it refuses the
tagged unions that pydantic writes (`oneOf` of `$ref`s, with a required constant in each). What is not proven here stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

MAX_COMPARISONS = 5_000  # of two schemas, in all: a hostile schema must not keep us
MAX_REFERENCES = 8  # in a row

_KINDS = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_DATA = frozenset({"const", "enum", "default", "examples"})  # these hold values, not schemas


def without_disjoint_one_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, in which each `oneOf` with provably disjoint branches is an `anyOf`. May raise `RecursionError`."""
    rewriter = _Rewriter(schema)
    return schema if rewriter.has_other_bases(schema) else dict(rewriter.rewrite(schema))


class _Rewriter:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._num_comparisons = 0

    def has_other_bases(self, schema: Any) -> bool:
        """References below an inner `$id` do not start at our root."""
        return any("$id" in inner for inner in _dicts(schema) if inner is not self._root)

    def rewrite(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.rewrite(item) for item in value]
        if not isinstance(value, dict):
            return value
        branches = value.get("oneOf")
        if isinstance(branches, list) and "anyOf" not in value and self._are_disjoint(branches):
            value = {("anyOf" if key == "oneOf" else key): inner for key, inner in value.items()}
        return {key: inner if key in _DATA else self.rewrite(inner) for key, inner in value.items()}

    def _are_disjoint(self, branches: list[Any]) -> bool:
        return all(self._disjoint(a, b) for i, a in enumerate(branches) for b in branches[:i])

    def _disjoint(self, a: Any, b: Any) -> bool:
        """No value fits both, as far as can be seen. Conditions of one schema hold together: two that exclude each other do."""
        self._num_comparisons += 1
        if self._num_comparisons > MAX_COMPARISONS:
            return False
        all_of_b = list(self._conditions(b))
        return any(self._exclude(x, y) for x in self._conditions(a) for y in all_of_b)

    def _conditions(self, schema: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
        if isinstance(schema, dict) and depth < MAX_REFERENCES:
            yield schema
            if isinstance(schema.get("$ref"), str):
                yield from self._conditions(self._resolve(schema["$ref"]), depth + 1)

    def _resolve(self, reference: str) -> Any:
        found: Any = self._root
        if not reference.startswith("#/"):
            return found if reference == "#" else None
        for step in unquote(reference[2:]).split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return found

    def _exclude(self, a: dict[str, Any], b: dict[str, Any]) -> bool:
        kinds = _kinds(a) & _kinds(b)
        if not kinds:
            return True
        values_a, values_b = _values(a), _values(b)
        if values_a is not None and values_b is not None:
            return not values_a & values_b
        return kinds == {"object"} and any(
            self._disjoint(a["properties"][name], b["properties"][name]) for name in _demanded(a) & _demanded(b)
        )


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _dicts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _dicts(inner)


def _kinds(schema: dict[str, Any]) -> frozenset[str]:
    """The types that a value may have; integers are numbers, too."""
    named = schema.get("type", [*_KINDS])
    names = named if isinstance(named, list) else [named]
    allowed = frozenset(name for name in names if isinstance(name, str))
    return allowed | {"integer"} if "number" in allowed else allowed


def _values(schema: dict[str, Any]) -> frozenset[str] | None:
    """All values that fit, if the schema lists them, each in one spelling."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(map(_spelling, values)) if isinstance(values, list) else None


def _spelling(value: Any) -> str:
    # 1.0 is 1; but true is not 1, as it is in Python.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True) if not isinstance(value, (dict, list)) else "a structure"


def _demanded(schema: dict[str, Any]) -> frozenset[str]:
    """Properties that must be there, and of which something is said."""
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return frozenset()
    return frozenset(name for name in required if isinstance(name, str) and name in properties)
