"""Jinja for chat templates: one can neither leave its sandbox nor take all time or memory of the process that runs it.

A template comes with a model and runs between other requests on the event loop. So, beyond Jinja's own sandbox: turns of loops
and calls of macros are counted, no operation may make a value above a size, and all values of a rendering together have a
budget: a template could keep them all. What is refused raises `SecurityError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 200_000  # turns and calls in one rendering: some 0.1 s; a chat of a thousand messages needs some thousands
MAX_VALUE_LEN = 16 * 1024 * 1024  # characters of a text, items of a list: no context window holds as much
MAX_TOTAL_LEN = 256 * 1024 * 1024  # of all values of one rendering: each part of a long chat is copied some ten times
MAX_WIDTH = 100_000  # to which a text is padded
MAX_EXPONENT, MAX_NUMBER_BITS = 1_000, 10_000
_ITEM_LEN = 8  # bytes of a list per item; as text it is seldom shorter
_PADDING = frozenset(
    {"center", "expandtabs", "indent", "ljust", "rjust", "tojson", "truncate", "wordwrap", "zfill", "batch", "slice"}
)
# They make no new value, or piece by piece, each of which is bounded by the filter that makes it.
_FREE = frozenset(
    {"attr", "count", "d", "default", "first", "last", "length", "map", "max", "min", "random", "reject", "rejectattr"}
    | {"select", "selectattr"}
)
_REARRANGING = frozenset({"batch", "dictsort", "groupby", "items", "list", "reverse", "slice", "sort", "unique"})
_LOOKING = re.compile(r"count|endswith|find|index|is[a-z]+|rfind|rindex|startswith")  # methods of texts that make none
_WIDE_FORMAT = re.compile(r"%[-+ #0]*(\*|\d{6,})|\{[^{}]*:[^{}]*\d{6,}")
_WIDTH_ELSEWHERE = re.compile(r"\{[^{}]*\{")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Immutable: a template may not change what it is given either."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *, max_total_len: int = MAX_TOTAL_LEN, **options: Any) -> None:
        super().__init__(finalize=self._output, **options)
        self._max_total_len = max_total_len
        self._num_steps = 0
        self._total_len = 0
        del self.globals["lipsum"]  # makes texts of any length
        for name in self.filters.keys() - _FREE:
            self.set_filter(name, self.filters[name])

    def set_filter(self, name: str, function: Callable[..., Any]) -> None:
        """The filter, refusing what would make too large a value."""
        is_contextual = hasattr(function, "jinja_pass_arg")  # then the first argument is Jinja's

        def bounded(*args: Any, **kwargs: Any) -> Any:
            jinjas, own = args[:is_contextual], list(args[is_contextual:])
            if own:
                if isinstance(own[0], Iterator):  # of unknown length; what it yields is charged as it is made
                    own[0] = list(own[0])
                receiver = str(own[0]) if name in ("replace", "format") else own[0]
                self._check_method(name, receiver, tuple(own[1:]), kwargs)
            return function(*jinjas, *own, **kwargs)

        if is_contextual:
            bounded.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]  # where Jinja itself keeps it
        self.filters[name] = bounded

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
        self._num_steps = self._total_len = 0

    # --- called by the template's own code -----------------------------------------------------------------------------

    @property
    def turn(self) -> None:
        """Read once a turn. No method: a call in a sandbox costs ten times as much."""
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise SecurityError(f"it takes more than {MAX_STEPS} turns of loops")

    def join_texts(self, values: list[Any]) -> str:
        """What `~` does."""
        self._check_len(sum(map(_text_len, values)))
        return "".join(map(str, values))

    def slice_of(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """What `[start:stop:step]` does."""
        part = slice(start, stop, step)
        if isinstance(value, str | bytes | list | tuple):
            self._check_len(len(range(*part.indices(len(value)))), _item_len(value))
        return value[part]

    def _output(self, value: Any) -> Any:
        """What `{{ }}` does: it may be kept by a `{% set %}` block or a macro around it."""
        self._check_len(_text_len(value))
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+":
                self._check_len(_len(left) + _len(right), _item_len(left))
            case "*":
                self._check_len(max(_len(left) * _times(right), _len(right) * _times(left)), _item_len(left, right))
                if _num_bits(left) + _num_bits(right) > MAX_NUMBER_BITS:
                    raise SecurityError("the number is too large")
            case "**":
                if not isinstance(right, int | float) or abs(right) > MAX_EXPONENT or _num_bits(left) > MAX_EXPONENT:
                    raise SecurityError("the exponent is too large")
            case "%" if isinstance(left, str):
                _check_format(left)
                self._check_len(len(left) + left.count("%") * _text_len(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Named as Jinja does: a template's keywords may be any.
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps a text's `format`
        receiver = getattr(method, "__self__", None)
        if isinstance(receiver, str):
            if method.__name__ == "join" and args and isinstance(args[0], Iterator):
                args = (list(args[0]), *args[1:])
            __self._check_method(method.__name__, receiver, args, kwargs)
        elif isinstance(receiver, list | dict) and method.__name__ == "copy":
            __self._check_len(len(receiver), _ITEM_LEN)
        return super().call(__context, __obj, *args, **kwargs)

    # --- sizes --------------------------------------------------------------------------------------------------------

    def _check_len(self, length: int, item_len: int = 1) -> None:
        """Before such a value is made. It counts until the rendering's end: whether it is kept, nobody knows."""
        if length > MAX_VALUE_LEN:
            raise SecurityError(f"a value of more than {MAX_VALUE_LEN} characters or items")
        self._total_len += length * item_len
        if self._total_len > self._max_total_len:
            raise SecurityError(f"values of more than {self._max_total_len} characters in all")

    def _check_method(self, name: str, receiver: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Of a text, or the filter of that name."""
        values = (*args, *kwargs.values())
        if name in _PADDING:
            width = max((_times(value) or _len(value) for value in values), default=0)
            if width > MAX_WIDTH:
                raise SecurityError(f"{name} to more than {MAX_WIDTH}")
            self._check_len(_text_len(receiver) + width * _num_lines(receiver))
        elif name == "replace" and len(values) >= 2:
            old, new = (str(value) if _text_len(value) <= MAX_VALUE_LEN else "" for value in values[:2])
            self._check_len(len(receiver) + receiver.count(old) * len(new))
        elif name == "join":
            items, separator = (values[:1] or ((),))[0], receiver
            if not isinstance(receiver, str):
                items, separator = receiver, values[0] if values else ""
            self._check_len(_text_len(items) + _len(separator) * _len(items))
        elif name in ("format", "format_map"):
            self._check_format_method(name, receiver, values)
        elif name == "sum":
            self._check_len(sum(map(_len, receiver)) if isinstance(receiver, list | tuple) else 0, _ITEM_LEN)
        elif name in _REARRANGING:
            self._check_len(_len(receiver), _ITEM_LEN)
        elif not (isinstance(receiver, str) and _LOOKING.fullmatch(name)):
            self._check_len(_text_len(receiver))

    def _check_format_method(self, name: str, receiver: str, values: tuple[Any, ...]) -> None:
        _check_format(receiver)
        if _WIDTH_ELSEWHERE.search(receiver) and any(_times(value) > MAX_WIDTH for value in values):
            raise SecurityError(f"{name} to more than {MAX_WIDTH}")
        num_fields = receiver.count("{") + receiver.count("%")  # the method's, the filter's
        self._check_len(len(receiver) + num_fields * sum(map(_text_len, values)))


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

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        part, line = node.arg, node.lineno
        if not isinstance(part, nodes.Slice):
            return node
        ends = [nodes.Const(None) if end is None else end for end in (part.start, part.stop, part.step)]
        slice_of = nodes.EnvironmentAttribute("slice_of", lineno=line)
        return nodes.Call(slice_of, [node.node, *ends], [], None, None, lineno=line)


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise SecurityError("a format that pads to more than 99999")


def _text_len(value: Any) -> int:
    """Of the value as text, at least nearly, and without making it. It stops where it is known to be too much: a list may hold
    the same list many times, or a namespace itself."""
    if isinstance(value, str | bytes):
        return len(value)
    length, rest = 0, [value]
    while rest and length <= MAX_VALUE_LEN:
        item = rest.pop()
        if isinstance(item, str | bytes):
            length += len(item)
            continue
        parts = _parts(item)
        length += _ITEM_LEN * (1 + len(parts))
        if length <= MAX_VALUE_LEN:
            rest += parts
    return length


def _parts(value: Any) -> Any:
    """What the value's text shows."""
    if isinstance(value, Namespace):
        value = vars(value)["_Namespace__attrs"]
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView) else ()


def _len(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _item_len(*values: Any) -> int:
    return _ITEM_LEN if any(isinstance(value, list | tuple) for value in values) else 1


def _num_lines(value: Any) -> int:
    """How often it may be padded."""
    if isinstance(value, str):
        return 1 + value.count("\n") + value.count("\t")
    return _text_len(value) // _ITEM_LEN


def _times(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _num_bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0
