"""Values that a model has written as plain text, to the JSON that a schema wants them as. What cannot be that is text."""

from __future__ import annotations

import json
from typing import Any

MAX_REFERENCES = 8  # that lead from one to the next
# What chat templates make of values in earlier calls is what models then write themselves.
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_OF_JSON = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}


def parameter_types(schema: dict[str, Any], name: str) -> frozenset[str]:
    """JSON schema's names of what a parameter may be. One that the schema does not know is text."""
    properties = schema.get("properties")
    declared = properties.get(name) if isinstance(properties, dict) else None
    return frozenset(_types(declared, schema, MAX_REFERENCES)) or frozenset({"string"})


def value_to_json(text: str, types: frozenset[str]) -> str:
    """JSON text."""
    read = _PYTHON.get(text.strip(), text.strip())
    try:
        value = json.loads(read, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _OF_JSON[type(value)]
    # Text is taken as it stands, quotes and all: of a text in quotes nobody knows whether they are meant.
    fits = kind != "string" and (kind in types or (kind == "integer" and "number" in types))
    return read if fits else json.dumps(text, ensure_ascii=False)


def _types(declared: Any, root: dict[str, Any], num_left: int) -> set[str]:
    if not isinstance(declared, dict) or num_left == 0:
        return set()
    if isinstance(reference := declared.get("$ref"), str):
        return _types(_found(reference, root), root, num_left - 1)
    if (named := declared.get("type")) is not None:
        return {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    if isinstance(values := declared.get("enum", [declared["const"]] if "const" in declared else None), list):
        return {_OF_JSON[type(value)] for value in values}
    branches = [branch for key in ("anyOf", "oneOf", "allOf") if isinstance(of := declared.get(key), list) for branch in of]
    return {kind for branch in branches for kind in _types(branch, root, num_left - 1)}


def _found(reference: str, root: Any) -> Any:
    """What `#/$defs/x` names; None where there is nothing."""
    for key in reference.removeprefix("#").split("/")[1:]:
        root = root.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
