"""Jinja for chat templates: one can neither leave its sandbox nor take all time or memory of the process that runs it.

A template comes with a model and runs between other requests on the event loop. So, beyond Jinja's own sandbox: turns of loops
and calls of macros are counted, and no operation may make a value above a size. What is refused raises `SecurityError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 200_000  # turns and calls in one rendering: some 0.1 s; a chat of a thousand messages needs some thousands
MAX_VALUE_LEN = 16 * 1024 * 1024  # characters of a text, items of a list: no context window holds as much
MAX_WIDTH = 100_000  # to which a text is padded
MAX_EXPONENT, MAX_NUMBER_BITS = 1_000, 10_000
_PADDING = frozenset(
    {"center", "expandtabs", "indent", "ljust", "rjust", "tojson", "truncate", "wordwrap", "zfill", "batch", "slice"}
)
_WIDE_FORMAT = re.compile(r"%[-+ #0]*(\*|\d{6,})|\{[^{}]*:[^{}]*\d{6,}")
_WIDTH_ELSEWHERE = re.compile(r"\{[^{}]*\{")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Immutable: a template may not change what it is given either."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._num_steps = 0
        for name in (_PADDING | {"join", "replace", "format"}) & self.filters.keys():
            self.filters[name] = bounded_filter(name, self.filters[name])

    def template(self, source: str) -> Template:
        """Raises `TemplateSyntaxError`."""
        tree = _Bounds().visit(self.parse(source))
        try:
            code = self.compile(tree)
        except SyntaxError as error:  # of the Python that it becomes: a `break` outside of loops is found there only
            raise TemplateSyntaxError(error.msg, 1) from error
        return Template.from_code(self, code, self.make_globals(None), None)

    def begin(self) -> None:
        """Before each rendering."""
        self._num_steps = 0

    # --- called by the template's own code -----------------------------------------------------------------------------

    @property
    def turn(self) -> None:
        """Read once a turn. No method: a call in a sandbox costs ten times as much."""
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise SecurityError(f"it takes more than {MAX_STEPS} turns of loops")

    def join_texts(self, values: list[Any]) -> str:
        """What `~` does."""
        texts = [str(value) for value in values]
        _check_len(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+":
                _check_len(_len(left) + _len(right))
            case "*":
                _check_len(max(_len(left) * _times(right), _len(right) * _times(left)))
                if _num_bits(left) + _num_bits(right) > MAX_NUMBER_BITS:
                    raise SecurityError("the number is too large")
            case "**":
                if not isinstance(right, int | float) or abs(right) > MAX_EXPONENT or _num_bits(left) > MAX_EXPONENT:
                    raise SecurityError("the exponent is too large")
            case "%" if isinstance(left, str):
                _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Named as Jinja does: a template's keywords may be any.
        # Of `format` Jinja hands out a wrapper of its own, which remembers the method.
        receiver = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(receiver, str):
            _check_text_method(__obj.__name__, receiver, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class _Bounds(NodeTransformer):
    """Puts a count before every turn, and a bound around what no hook of the sandbox sees."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._counted(node)

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        turn = nodes.EnvironmentAttribute("turn", lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        result: nodes.Node = node
        return result

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        line = node.lineno
        join = nodes.EnvironmentAttribute("join_texts", lineno=line)
        return nodes.Call(join, [nodes.List(node.nodes, lineno=line)], [], None, None, lineno=line)


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, refusing what would make too large a value."""
    is_contextual = hasattr(function, "jinja_pass_arg")  # then the first argument is Jinja's

    def bounded(*args: Any, **kwargs: Any) -> Any:
        own = args[1:] if is_contextual else args
        if own:
            _check_text_method(name, str(own[0]) if name in ("replace", "format") else own[0], own[1:], kwargs)
        return function(*args, **kwargs)

    if is_contextual:
        bounded.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]  # where Jinja itself keeps it
    return bounded


def _check_text_method(name: str, receiver: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Of a text, or the filter of that name."""
    values = (*args, *kwargs.values())
    if name in _PADDING and any(isinstance(value, int) and abs(value) > MAX_WIDTH for value in values):
        raise SecurityError(f"{name} to more than {MAX_WIDTH}")
    texts = [str(value) for value in values if not isinstance(value, list | tuple | dict)]
    if name == "replace" and len(texts) >= 2:
        _check_len(len(receiver) + receiver.count(texts[0]) * len(texts[1]))
    elif name == "join":
        items, separator = (
            (receiver, texts[0] if texts else "") if not isinstance(receiver, str) else (values[0] if values else (), receiver)
        )
        if isinstance(items, list | tuple):
            _check_len(sum(len(str(item)) + len(separator) for item in items))
    elif name in ("format", "format_map"):
        _check_format(receiver)
        if _WIDTH_ELSEWHERE.search(receiver) and any(_times(value) > MAX_WIDTH for value in values):
            raise SecurityError(f"{name} to more than {MAX_WIDTH}")
        _check_len(len(receiver) * (1 + sum(map(len, texts))))


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise SecurityError("a format that pads to more than 99999")


def _check_len(length: int) -> None:
    if length > MAX_VALUE_LEN:
        raise SecurityError(f"a value of more than {MAX_VALUE_LEN} characters or items")


def _len(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _times(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _num_bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0
