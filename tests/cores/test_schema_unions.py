"""A `oneOf` becomes an `anyOf` only where no value fits two branches."""

from __future__ import annotations

from typing import Any

import pytest

from cores.schema_unions import without_disjoint_one_of

A, B = {"type": "object", "required": ["k"], "properties": {"k": {"const": "a"}}}, {"$ref": "#/$defs/b"}
DEFS = {"$defs": {"b": {"type": "object", "required": ["k"], "properties": {"k": {"enum": ["b", "c"]}}}}}


def branches(*schemas: Any) -> dict[str, Any]:
    return {**DEFS, "oneOf": list(schemas)}


@pytest.mark.parametrize(
    "schemas",
    [
        [{"type": "string"}, {"type": "null"}],
        [{"type": ["string", "null"]}, {"type": "number"}],
        [{"const": 1}, {"const": 2}],
        [{"const": True}, {"const": 1}],
        [{"enum": [1, 2]}, {"enum": [3, "1"]}],
        [A, B],
        [B, A, {"type": "null"}],
        [{"$ref": "#/$defs/b", "type": "object"}, {"type": "integer"}],
    ],
)
def test_branches_that_exclude_each_other(schemas: list[Any]) -> None:
    result = without_disjoint_one_of(branches(*schemas))
    assert result == {**DEFS, "anyOf": schemas}
    assert without_disjoint_one_of({"items": branches(*schemas), **DEFS})["items"] == {**DEFS, "anyOf": schemas}


@pytest.mark.parametrize(
    "schemas",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"const": 1.0}],
        [{"enum": [1, 2]}, {"enum": [2, 3]}],
        [{"const": {"a": 1}}, {"const": {"a": 2}}],  # they do, but nobody looks inside
        [A, A],
        [A, {"type": "object", "properties": {"k": {"const": "b"}}}],  # the second may come without k
        [{"type": "string", "minLength": 3}, {"type": "string", "maxLength": 2}],
        [{"minimum": 0}, {"type": "string"}],  # a string fits the first, too
        [{"$ref": "#/$defs/missing"}, {"type": "string"}],
        [{"$ref": "#/oneOf/0"}, {"type": "string"}],
        [True, {"type": "string"}],
        ["nonsense", 5],
    ],
)
def test_branches_that_may_overlap_stay(schemas: list[Any]) -> None:
    assert without_disjoint_one_of(branches(*schemas)) == branches(*schemas)


def test_values_are_not_taken_for_schemas() -> None:
    values = {"const": {"oneOf": [{"type": "string"}, {"type": "null"}]}, "default": {"oneOf": [{"const": 1}, {"const": 2}]}}
    assert without_disjoint_one_of(values) == values
    assert without_disjoint_one_of({"properties": {"oneOf": {"type": "null"}}}) == {"properties": {"oneOf": {"type": "null"}}}


def test_a_schema_with_an_any_of_beside_it_or_with_other_bases_stays() -> None:
    for schema in (
        {"anyOf": [{}], "oneOf": [{"const": 1}, {"const": 2}]},
        {"oneOf": [{"const": 1}, {"const": 2}], "$defs": {"x": {"$id": "other"}}},
    ):
        assert without_disjoint_one_of(schema) == schema


def test_a_hostile_number_of_branches_is_not_compared_to_the_end() -> None:
    many = branches(*({"const": i} for i in range(2000)))
    assert without_disjoint_one_of(many) == many
