"""What `tools` and `tool_choice` ask for: whether it can be served, the grammar of a call that must be made, and how answers
are taken apart. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from cores.sampling_params import Reasoning, StructuredOutputs
from gateway.errors import InvalidRequestError
from gateway.parsers.choice import TOOL_CALL_PARSERS, CallStage, ChoiceParser, call_stage
from gateway.parsers.reasoning import ReasoningParser
from gateway.parsers.tool_calls import REQUIRED, NamedCallParser, ToolCallParser
from gateway.server.chat_message import AnswerForm
from gateway.server.schema import ChatCompletionRequest
from gateway.server.structured import json_outputs

ANY_ARGUMENTS = {"type": "object"}
ALLOWED_CHOICES = "none, auto, required, or {'type': 'function', 'function': {'name': …}}"
MISTRAL_ID_CHARS = 9  # exactly: its chat template refuses others when the call comes back in a message


def check_tools(request: ChatCompletionRequest, parser: str | None) -> None:
    """Raises `InvalidRequestError` for tools or a choice that make no sense, or that need a parser and have none."""
    choice = request.tool_choice
    if choice == "none":
        return
    functions = _functions(request)
    if isinstance(choice, str) and choice not in ("auto", "required"):
        raise InvalidRequestError(f"tool_choice must be {ALLOWED_CHOICES}, got {_shown(choice)}", "tool_choice")
    name = _named(request)
    if name is not None and name not in functions:
        known = ", ".join(map(repr, functions)) or "none"
        raise InvalidRequestError(f"tool_choice names the function {_shown(name)}; tools has {known}", "tool_choice")
    if choice == "required" and not functions:
        raise InvalidRequestError("tool_choice 'required' needs tools", "tool_choice")
    if functions and choice in (None, "auto") and parser is None:
        allowed = ", ".join(TOOL_CALL_PARSERS)
        raise InvalidRequestError(
            f"tools with tool_choice 'auto' need a server that was started with --tool-call-parser ({allowed});"
            " 'required', a named function and 'none' do not",
            "tools",
        )


def forced_call(request: ChatCompletionRequest) -> StructuredOutputs | None:
    """What the answer must be where a call must be made: the arguments of the named function, or a list of calls."""
    functions, name = _functions(request) if request.tool_choice != "none" else {}, _named(request)
    if name in functions:
        return json_outputs(functions[name], "tool_choice")
    if request.tool_choice != "required" or not functions:
        return None
    calls = [_call_schema(name, i) for i, name in enumerate(functions)]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if request.parallel_tool_calls is False:
        schema["maxItems"] = 1
    # References inside a function's schema count from its root, which is no longer the whole.
    try:
        schema["$defs"] = {str(i): _moved(parameters, f"#/$defs/{i}") for i, parameters in enumerate(functions.values())}
    except RecursionError:
        raise InvalidRequestError("tools: a schema is nested too deeply", "tools") from None
    return json_outputs(schema, "tool_choice")


def answer_form(
    request: ChatCompletionRequest, parser: str | None, reasoning: Reasoning | None, *, has_grammar: bool
) -> AnswerForm | None:
    """None where an answer is nothing but content."""
    new_calls = _call_stage(request, parser, has_grammar)
    if new_calls is None and reasoning is None:
        return None

    def new_parser() -> ChoiceParser:
        max_calls = 1 if request.parallel_tool_calls is False else None
        calls = None if new_calls is None else new_calls()
        return ChoiceParser(None if reasoning is None else ReasoningParser(reasoning), calls, max_calls=max_calls)

    calls_finish = _named(request) is None
    if parser == "mistral":
        return AnswerForm(new_parser, calls_finish, lambda: secrets.token_hex(MISTRAL_ID_CHARS)[:MISTRAL_ID_CHARS])
    return AnswerForm(new_parser, calls_finish)


def _call_stage(request: ChatCompletionRequest, parser: str | None, has_grammar: bool) -> Callable[[], CallStage] | None:
    if not request.tools or request.tool_choice == "none":
        return None
    if (name := _named(request)) is not None:
        return partial(NamedCallParser, name)
    if request.tool_choice == "required":
        return partial(ToolCallParser, REQUIRED)
    # A grammar that the request brought itself is about content.
    return None if has_grammar or parser is None else partial(call_stage, parser, _functions(request))


def _named(request: ChatCompletionRequest) -> str | None:
    """The function that must be called. Raises `InvalidRequestError`."""
    choice = request.tool_choice
    if not isinstance(choice, dict):
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise InvalidRequestError(f"tool_choice must be {ALLOWED_CHOICES}, got {_shown(choice)}", "tool_choice")
    return name


def _functions(request: ChatCompletionRequest) -> dict[str, dict[str, Any]]:
    """The schema of each function's arguments, by name. Raises `InvalidRequestError`."""
    functions = {}
    for i, tool in enumerate(request.tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise InvalidRequestError(
                f"tools[{i}] must be {{'type': 'function', 'function': {{'name': …}}}}, got {_shown(tool)}", "tools"
            )
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not 0 < len(name) <= 256:
            raise InvalidRequestError(
                f"tools[{i}].function.name must be text of 1 to 256 characters, got {_shown(name)}", "tools"
            )
        if parameters is not None and not isinstance(parameters, dict):
            raise InvalidRequestError(
                f"tools[{i}].function.parameters must be a JSON schema of an object, got {_shown(parameters)}", "tools"
            )
        functions[name] = ANY_ARGUMENTS | (parameters or {})
    return functions


def _shown(value: Any) -> str:
    """Text shortened, and of anything else its type: it may be of any depth."""
    return f"{value!r:.80}" if isinstance(value, str) else type(value).__name__


def _call_schema(name: str, number: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{number}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """The same schema where `root` is what its references call `#`."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    if isinstance(reference := moved.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
