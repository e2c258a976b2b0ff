"""From `response_format` and `structured_outputs` to what an engine is told about the form of its output. Pure.

Knows the request's fields only: whether a schema or grammar can be compiled is found out by the input processor.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cores.sampling_params import StructuredOutputKind, StructuredOutputs
from gateway.errors import InvalidRequestError
from gateway.server.schema import GenerationRequest, ResponseFormat, StructuredOutputsFields

ANY_OBJECT = {"type": "object"}
FIELDS = ("json", "json_object", "regex", "choice", "grammar")


def to_structured_outputs(request: GenerationRequest) -> StructuredOutputs | None:
    """None for free text. Raises `InvalidRequestError` for what makes no sense."""
    from_format = None if request.response_format is None else _from_response_format(request.response_format)
    from_fields = None if request.structured_outputs is None else _from_fields(request.structured_outputs)
    if from_format is not None and from_fields is not None:
        raise InvalidRequestError("response_format and structured_outputs exclude each other", "structured_outputs")
    return from_format or from_fields


def _from_response_format(wanted: ResponseFormat) -> StructuredOutputs | None:
    match wanted.type:
        case "text":
            return None
        case "json_object":
            return json_outputs(ANY_OBJECT, "response_format")
        case "json_schema":
            if wanted.json_schema is None:
                raise InvalidRequestError(
                    "response_format.json_schema is required for the type 'json_schema'", "response_format"
                )
            return json_outputs(wanted.json_schema.schema, "response_format")
    raise InvalidRequestError(
        f"response_format.type must be one of text, json_object, json_schema, got {wanted.type!r}", "response_format"
    )


def _from_fields(fields: StructuredOutputsFields) -> StructuredOutputs:
    given = [name for name in FIELDS if getattr(fields, name) not in (None, False)]
    if len(given) != 1:
        raise InvalidRequestError(
            f"structured_outputs must have exactly one of {', '.join(FIELDS)}, got {', '.join(given) or 'none'}",
            "structured_outputs",
        )
    match given[0]:
        case "json":
            return json_outputs(_schema(fields.json), "structured_outputs", _spacing(fields))
        case "json_object":
            return json_outputs(ANY_OBJECT, "structured_outputs", _spacing(fields))
        case "choice":
            return StructuredOutputs(StructuredOutputKind.CHOICE, msgspec.json.encode(fields.choice).decode())
        case name:
            return StructuredOutputs(StructuredOutputKind(name), getattr(fields, name))


def _schema(schema: dict[str, Any] | str | None) -> dict[str, Any]:
    """vLLM also takes a schema as the text of one."""
    if not isinstance(schema, str):
        return schema or {}
    try:
        return msgspec.json.decode(schema, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequestError(f"structured_outputs.json is not a JSON schema: {error}", "structured_outputs") from None


def _spacing(fields: StructuredOutputsFields) -> dict[str, Any]:
    """As options of llguidance."""
    if fields.disable_any_whitespace:
        return {"whitespace_flexible": False, "whitespace_pattern": None}
    return {} if fields.whitespace_pattern is None else {"whitespace_pattern": fields.whitespace_pattern}


def json_outputs(schema: dict[str, Any], param: str, options: dict[str, Any] | None = None) -> StructuredOutputs:
    """`param` is the request's field that asked for it. Raises `InvalidRequestError`."""
    if options:
        schema = {**schema, "x-guidance": options}
    try:
        spec = msgspec.json.encode(schema).decode()
    except RecursionError:
        raise InvalidRequestError(f"{param}: the schema is nested too deeply", param) from None
    return StructuredOutputs(StructuredOutputKind.JSON, spec, param)
