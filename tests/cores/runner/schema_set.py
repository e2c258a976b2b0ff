"""Two hundred JSON schemas: forty features, five variations each. All but the recursive ones bound their outputs."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

COMPACT = {"whitespace_flexible": False, "whitespace_pattern": None}
SPACED = {"whitespace_pattern": "[ \\n]{1,2}"}


def text(max_length: int = 6, **more: Any) -> Schema:
    return {"type": "string", "maxLength": max_length, **more}


def integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def obj(*optional: str, **properties: Schema) -> Schema:
    """Closed; everything but `optional` is required."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def array(items: Schema, low: int, high: int) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


BOOL, NULL = {"type": "boolean"}, {"type": "null"}
POINT = obj(x=integer(-9, 9), y=integer(-9, 9))

# Feature → its variations. What a reader wants to know of a failure is in the name.
FEATURES: dict[str, list[Schema]] = {
    "integer within a range": [integer(0, 9), integer(-5, 5), integer(100, 20_000), integer(-300, -7), integer(7, 7)],
    "integer between exclusive bounds": [
        {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high}
        for low, high in [(0, 2), (-2, 2), (99, 1001), (-11, -9), (5, 500)]
    ],
    "number within a range": [
        {"type": "number", "minimum": low, "maximum": high} for low,
        high in [(0, 1), (-1, 1), (0.5, 2.75), (-20, -3.5), (10, 99)]
    ],
    "multiple of": [
        {"type": "integer", "minimum": 0, "maximum": 999, "multipleOf": 5},
        {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 7},
        {"type": "integer", "minimum": 10, "maximum": 90, "multipleOf": 10},
        {"type": "number", "minimum": 0, "maximum": 9, "multipleOf": 0.5},
        {"type": "integer", "minimum": 1, "maximum": 64, "multipleOf": 16},
    ],
    "boolean and null": [BOOL, NULL, {"type": ["boolean", "null"]}, array(BOOL, 1, 4), obj(yes=BOOL, nothing=NULL)],
    "string length": [
        text(0), text(1), text(8, minLength=8), {"type": "string", "minLength": 2, "maxLength": 5}, text(12, minLength=1),
    ],
    "string pattern": [
        {"type": "string", "pattern": pattern}
        for pattern in ["^[a-c]{1,4}$", "^\\d{3}-[A-Z]{2}$", "^(red|green|blue)$", "^x?y?z?$", "^[^\\x00-\\x1f\"\\\\]{2}$"]
    ],
    "pattern and length": [
        {"type": "string", "pattern": "^[a-z]+$", "minLength": low, "maxLength": high}
        for low, high in [(1, 1), (2, 4), (0, 3), (5, 5), (3, 9)]
    ],
    "string format": [
        {"type": "string", "format": name} for name in ["date", "date-time", "uuid", "ipv4", "time"]
    ],
    "enum of strings": [
        {"enum": ["a"]}, {"enum": ["yes", "no", "maybe"]}, {"enum": ["one", "one two", "one two three"]},
        {"type": "string", "enum": ["", "x"]}, {"enum": [f"option {i}" for i in range(30)]},
    ],
    "enum of mixed values": [
        {"enum": [1, "1", None]}, {"enum": [True, False, 0, 1]}, {"enum": [1.5, -2, 1000]},
        {"enum": [[], [1], {"a": 1}]}, {"enum": [None, "null", "true", True]},
    ],
    "constant": [{"const": "fixed"}, {"const": 42}, {"const": None}, {"const": [1, "a", False]}, {"const": {"a": {"b": []}}}],
    "array of bounded length": [
        array(integer(0, 9), 0, 0), array(integer(0, 9), 1, 1), array(integer(0, 99), 2, 5), array(text(3), 0, 4),
        array(NULL, 3, 3),
    ],
    "array of choices": [
        array({"enum": ["a", "b"]}, low, high) for low, high in [(0, 2), (1, 3), (2, 2), (4, 6), (0, 5)]
    ],
    "array in an array": [
        array(array(integer(0, 9), 0, 2), 0, 3), array(array(array(BOOL, 1, 1), 1, 2), 1, 2),
        array(array(text(2), 1, 2), 2, 2),
        array(array({"enum": [1, None]}, 3, 3), 1, 2), array(array(array(array(NULL, 0, 1), 0, 1), 0, 1), 0, 1),
    ],
    "tuple": [
        {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        for items in [[BOOL], [integer(0, 9), text(3)], [NULL, BOOL, NULL], [array(BOOL, 0, 1), POINT],
                      [{"const": i} for i in range(5)]]
    ],
    "tuple with a tail": [
        {"type": "array", "prefixItems": [{"const": "head"}], "items": items, "minItems": low, "maxItems": high}
        for items, low, high in [(BOOL, 1, 2), (integer(0, 9), 2, 4), (text(2), 3, 3), (NULL, 1, 5), (POINT, 1, 2)]
    ],
    "required fields": [
        obj(a=BOOL), obj(a=integer(0, 9), b=text(4)), obj(name=text(5), age=integer(0, 120)),
        obj(a=NULL, b=NULL, c=NULL, d=NULL),
        obj(zeta=BOOL, alpha=BOOL, mid=BOOL),
    ],
    "optional fields": [
        obj("a", a=BOOL), obj("a", "b", a=BOOL, b=BOOL), obj("b", a=integer(0, 9), b=text(3), c=BOOL),
        obj("a", "b", "c", "d", a=NULL, b=NULL, c=NULL, d=NULL), obj("last", first=text(3), last=text(3)),
    ],
    "object in an object": [
        obj(a=POINT), obj(a=obj(b=obj(c=BOOL))), obj(p=POINT, q=POINT), obj("inner", inner=obj("x", x=NULL), z=BOOL),
        obj(a=obj(b=obj(c=obj(d=obj(e=integer(0, 1)))))),
    ],
    "array of objects": [
        array(POINT, 1, 2), array(obj("a", a=BOOL), 0, 3), obj(points=array(POINT, 0, 2), label=text(3)),
        array(obj(tags=array(text(2), 0, 2)), 1, 2), array(obj(a=array(obj(b=BOOL), 1, 1)), 1, 1),
    ],
    "nothing at all": [
        obj(), array(BOOL, 0, 0), {"enum": [""]}, array(obj(), 1, 3), obj(a=obj(), b=array(NULL, 0, 0)),
    ],
    "null unions": [
        {"type": ["integer", "null"], "minimum": 0, "maximum": 50}, {"type": ["string", "null"], "maxLength": 4},
        obj(a={"anyOf": [text(3), NULL]}), array({"type": ["boolean", "null"]}, 1, 4), obj("a", a={"oneOf": [POINT, NULL]}),
    ],
    "unions of types": [
        {"type": ["boolean", "integer"], "minimum": 0, "maximum": 3}, {"anyOf": [integer(0, 9), text(3)]},
        {"anyOf": [BOOL, array(BOOL, 1, 2)]},
        {"anyOf": [POINT, NULL, integer(5, 6)]}, array({"anyOf": [integer(0, 9), {"enum": ["x", "y"]}, NULL]}, 2, 4),
    ],
    "anyOf objects": [
        {"anyOf": [obj(a=BOOL), obj(b=BOOL)]}, {"anyOf": [obj(a=BOOL), obj(a=BOOL, b=BOOL)]},
        {"anyOf": [POINT, obj(r=integer(0, 9))]},
        array({"anyOf": [obj(k={"const": "a"}), obj(k={"const": "b"}, v=NULL)]}, 1, 3), obj(one={"anyOf": [POINT, obj()]}),
    ],
    "oneOf types": [
        {"oneOf": [text(3), integer(0, 9)]}, {"oneOf": [BOOL, NULL]}, {"oneOf": [POINT, array(BOOL, 1, 1)]},
        {"oneOf": [{"const": 1}, {"const": 2}]}, obj(a={"oneOf": [NULL, text(2)]}),
    ],
    "oneOf by a tag": [
        {"oneOf": [obj(kind={"const": "a"}, n=integer(0, 9)), obj(kind={"const": "b"}, t=text(3))]},
        {"oneOf": [obj(kind={"enum": ["a", "b"]}), obj(kind={"const": "c"}, v=BOOL)]},
        array({"oneOf": [obj(op={"const": "add"}, by=integer(1, 9)), obj(op={"const": "stop"})]}, 1, 3),
        {"oneOf": [obj(t={"const": i}) for i in range(5)]},
        obj(shape={"oneOf": [obj(type={"const": "circle"}, r=integer(1, 9)), obj(type={"const": "box"}, w=integer(1, 9))]}),
    ],
    "allOf": [
        {"allOf": [integer(0, 100), {"minimum": 50}]}, {"allOf": [text(8), {"minLength": 3}]},
        {"allOf": [{"type": "string", "pattern": "^[a-f]+$"}, {"minLength": 2, "maxLength": 4}]},
        {"allOf": [obj(a=BOOL)]}, {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]},
    ],
    "allOf of objects": [
        {"allOf": [{"type": "object", "properties": {"a": BOOL}}, {"properties": {"b": NULL}}, {"required": required}],
         "properties": {"a": True, "b": True}, "additionalProperties": False}
        for required in ([], ["a"], ["b"], ["a", "b"], ["b", "a"])
    ],
    "reference": [
        {"$defs": {"p": POINT}, "$ref": "#/$defs/p"},
        {"$defs": {"b": BOOL}, **obj(a={"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/b"})},
        {"$defs": {"n": integer(0, 9)}, **array({"$ref": "#/$defs/n"}, 1, 3)},
        {"$defs": {"a~b/c d": NULL}, **obj(a={"$ref": "#/$defs/a~0b~1c%20d"})},
        {"$defs": {"c": {"enum": ["red", "blue"]}}, **obj("d", c={"$ref": "#/$defs/c"}, d={"$ref": "#/$defs/c"})},
    ],
    "reference to a reference": [
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": BOOL}, "$ref": "#/$defs/a"},
        {"$defs": {"line": obj(p={"$ref": "#/$defs/point"}, q={"$ref": "#/$defs/point"}), "point": POINT},
         "$ref": "#/$defs/line"},
        {"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/y"}, NULL]}, "y": text(3)}, **array({"$ref": "#/$defs/x"}, 1, 3)},
        obj(a=BOOL, b={"$ref": "#/properties/a"}),
        {"$defs": {"u": {"oneOf": [{"$ref": "#/$defs/v"}, {"$ref": "#/$defs/w"}]}, "v": integer(0, 9), "w": BOOL},
         "$ref": "#/$defs/u"},
    ],
    "older drafts": [
        {"definitions": {"p": POINT}, "$ref": "#/definitions/p", "$schema": "http://json-schema.org/draft-07/schema#"},
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [BOOL, NULL],
         "additionalItems": False, "minItems": 2},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", **POINT}, {"$id": "https://example.org/p", **POINT},
        {"definitions": {"k": {"enum": [1, 2]}}, **obj(k={"$ref": "#/definitions/k"})},
    ],
    "annotations change nothing": [
        {**integer(0, 9), "title": "N", "description": "a number", "default": 5, "examples": [1]},
        {**POINT, "title": "Point"},
        obj(a={**BOOL, "description": "yes?"}, b={**text(3), "deprecated": True}),
        {**text(3), "$comment": "none", "readOnly": True},
        {"title": "Choice", "enum": ["a", "b"], "description": "one of both", "writeOnly": False},
    ],
    "text that JSON escapes": [
        {"enum": ["a\"b", "c\\d"]}, {"const": "line\nbreak\ttab"}, {"enum": ["é", "日本", "😀"]}, {"const": "/slash/\u0001"},
        array({"enum": ["\u2028", "{}", "[]", "\""]}, 2, 3),
    ],
    "names that JSON escapes": [
        obj(**{"a b": BOOL}), obj(**{"a\"b": BOOL}), obj(**{"": NULL}), obj(naïve=BOOL, 日=NULL),
        obj(**{"a\\": BOOL, "x.y-z": NULL}),
    ],
    "open objects of bounded size": [
        {"type": "object", "additionalProperties": BOOL, "maxProperties": 0},
        *[
            {"type": "object", "patternProperties": {"^[a-c]$": NULL}, "additionalProperties": False, "maxProperties": high}
            for high in (1,)
        ],
        {"type": "object", "properties": {"a": BOOL}, "required": ["a"], "additionalProperties": NULL, "maxProperties": 1},
        {"type": "object", "patternProperties": {"^k[0-9]$": integer(0, 9)}, "additionalProperties": False, "minProperties": 1,
         "maxProperties": 1},
        {"type": "object", "properties": {"a": BOOL}, "required": ["a"], "additionalProperties": BOOL, "minProperties": 1,
         "maxProperties": 1},
    ],
    "deep nesting": [
        obj(a=array(obj(b=array(obj(c=BOOL), 1, 2)), 1, 2)), array(array(array(POINT, 1, 1), 1, 1), 1, 1),
        obj(a=obj(b=array({"anyOf": [obj(c=NULL), array(BOOL, 1, 1)]}, 1, 2))),
        array(obj(k={"enum": ["a"]}, v=array(text(2), 1, 2)), 2, 2),
        obj("o", o=obj("o", o=obj("o", o=obj("o", o=BOOL)))),
    ],
    "what programs ask for": [
        obj("email", name=text(8), age=integer(0, 120), email={"anyOf": [text(8), NULL]}),
        obj(answer={"enum": ["A", "B", "C", "D"]}, confidence=integer(0, 100)),
        obj(name={"const": "get_weather"}, arguments=obj("unit", city=text(6), unit={"enum": ["C", "F"]})),
        obj(steps=array(obj(explanation=text(6), output=text(4)), 1, 2), final_answer=text(4)),
        array(obj("labels", id=integer(1, 99), labels=array({"enum": ["bug", "docs"]}, 0, 2), done=BOOL), 1, 2),
    ],
    "limits on limits": [
        {"type": "array", "items": integer(0, 9), "minItems": 1, "maxItems": 30}, text(30, minLength=25),
        integer(-(10**12), 10**12),
        {"type": "string", "pattern": "^([ab]{2}){1,5}$"}, obj(**{f"field_{i}": BOOL for i in range(12)}),
    ],
    "recursion": [
        {"$defs": {"list": obj(v=integer(0, 9), next={"anyOf": [{"$ref": "#/$defs/list"}, NULL]})}, "$ref": "#/$defs/list"},
        {"$defs": {"tree": obj(kids=array({"$ref": "#/$defs/tree"}, 0, 2))}, "$ref": "#/$defs/tree"},
        {"$defs": {"e": {"anyOf": [integer(0, 9), obj(op={"enum": ["+", "-"]}, a={"$ref": "#/$defs/e"})]}},
         "$ref": "#/$defs/e"},
        obj("child", name=text(3), child={"$ref": "#"}), {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    ],
}  # fmt: skip
UNBOUNDED = "recursion"


def schema_set() -> list[tuple[str, Schema]]:
    """(feature and number of the variation, schema). The last of each feature may be spaced, the others come without spaces."""
    return [
        (f"{feature} {i}", {**schema, "x-guidance": SPACED if i == 4 else COMPACT})
        for feature, schemas in FEATURES.items()
        for i, schema in enumerate(schemas)
    ]
