"""A `oneOf` becomes an `anyOf` only where no value fits two branches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

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


scalars = st.sampled_from([None, True, False, 0, 1, 1.0, 2, "a", "b", ""])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["k", "v"]), inner, max_size=2),
    max_leaves=4,
)
kinds = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
leaves = st.one_of(
    st.booleans(),
    st.fixed_dictionaries({}, optional={"type": kinds | st.lists(kinds, min_size=1, max_size=2, unique=True)}),
    st.fixed_dictionaries({"const": values}),
    st.fixed_dictionaries({"enum": st.lists(values, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"$ref": st.sampled_from(["#/$defs/a", "#/$defs/b"])}),
)
schemas = st.recursive(
    leaves,
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": kinds,
            "properties": st.dictionaries(st.sampled_from(["k", "v"]), inner, max_size=2),
            "required": st.lists(st.sampled_from(["k", "v"]), max_size=2, unique=True),
            "oneOf": st.lists(inner, min_size=1, max_size=3),
        },
    ),
    max_leaves=6,
)


@given(st.lists(schemas, min_size=2, max_size=3), leaves, leaves, st.lists(values, min_size=1, max_size=8))
def test_the_same_values_fit(branches: list[Any], a: Any, b: Any, instances: list[Any]) -> None:
    schema = {"$defs": {"a": {"type": "object", "properties": {"k": a}, "required": ["k"]}, "b": b}, "oneOf": branches}
    if "$ref" in (b if isinstance(b, dict) else {}):
        schema["$defs"]["b"] = {"type": "null"}  # no reference to itself
    before, after = Draft202012Validator(schema), Draft202012Validator(without_disjoint_one_of(schema))
    for instance in instances:
        assert before.is_valid(instance) == after.is_valid(instance), (schema, instance)


nonsense = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "oneOf", "const", "enum", "properties", "required", "$ref", "$id", "$defs"]), inner
        )
    ),
    max_leaves=12,
)


@given(st.lists(nonsense, max_size=3), nonsense)
def test_no_nonsense_raises(branches: list[Any], definitions: Any) -> None:
    without_disjoint_one_of({"oneOf": branches, "$defs": definitions, "type": "object"})
