"""From chat messages and text to token ids: the model's chat template, sandboxed, and its tokenizer."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from cores.config import ConfigError
from gateway.chat_messages import normalise_messages
from gateway.errors import EngineDeadError, InvalidRequestError
from gateway.template_sandbox import TemplateSandbox
from gateway.tokenizer import Tokenizer, read_json

LONG_TEXT_CHARS = 2_000  # about 0.7 ms of tokenizing: longer ones would keep the loop from others' tokens
MAX_THREADS = 4
MAX_RENDERED_CHARS = 16 * 1024 * 1024  # no context window holds as much; a template that loops ends here
# Stands behind the final message while it is rendered: what the template writes after it is to be cut off.
_END_OF_CONTENT = "\ue000end of content\ue000"
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"})
# What a template's code may raise on messages that it does not expect.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class Renderer:
    """One model's template and tokenizer. Its calls are pure; only `encode_async` leaves the loop's thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None,
        default_kwargs: Mapping[str, Any] = MappingProxyType({}),
        *,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`default_kwargs` are for the template, where a request does not say. `clock` is what templates see as the date.

        Raises `ConfigError` for a template with a syntax error.
        """
        if reserved := sorted(_RESERVED & default_kwargs.keys()):
            raise ConfigError(f"--default-chat-template-kwargs must not set {reserved[0]!r}")
        self._default_kwargs = dict(default_kwargs)
        self.tokenizer = tokenizer
        self._clock = clock
        self._template = None if chat_template is None else self._compile(chat_template)
        self._executor: ThreadPoolExecutor | None = None

    @classmethod
    def from_directory(
        cls,
        path: str | Path,
        chat_template_file: str | None = None,
        shown_tokens: tuple[str, ...] = (),
        default_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> Renderer:
        """`shown_tokens` as in `Tokenizer`. Raises `ConfigError` that names what is missing or broken."""
        directory = Path(path)
        tokenizer = Tokenizer.from_directory(directory, shown_tokens)
        return cls(tokenizer, _load_template(directory, chat_template_file), default_kwargs)

    # --- chat ---------------------------------------------------------------------------------------------------------

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt as text, special tokens written out: encode it without adding them again.

        Raises `InvalidRequestError` for messages that are no chat, or that the template refuses.
        """
        if self._template is None:
            raise InvalidRequestError("the model has no chat template; start the server with --chat-template FILE", "messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        kwargs = chat_template_kwargs or {}
        if reserved := sorted(_RESERVED & kwargs.keys()):
            raise InvalidRequestError(f"chat_template_kwargs must not set {reserved[0]!r}", "chat_template_kwargs")
        chat = normalise_messages(messages)
        if continue_final_message:
            chat[-1]["content"] += _END_OF_CONTENT
        context = (
            self._default_kwargs
            | kwargs
            | {"messages": chat, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        )
        text = _render(self._template, context)
        return _cut_behind_final_message(text) if continue_final_message else text

    def _compile(self, source: str) -> jinja2.Template:
        env = TemplateSandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock])
        env.set_filter("tojson", _to_json)
        env.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda template: self._clock().strftime(template),
            "bos_token": self.tokenizer.bos_token or "",
            "eos_token": self.tokenizer.eos_token or "",
        }
        try:
            return env.template(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is broken in line {error.lineno}: {error.message}") from error

    # --- tokens -------------------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises `InvalidRequestError` for text that is no Unicode."""
        return self.tokenizer.encode(text, add_special_tokens)

    async def encode_async(self, text: str, add_special_tokens: bool) -> list[int]:
        """`encode`, in a thread when the text is long. Cancelling it does not stop the thread, only the waiting."""
        if len(text) <= LONG_TEXT_CHARS:
            return self.encode(text, add_special_tokens)
        if self._executor is None:
            # A few: a prompt that takes seconds must not hold up everybody's, nor all of them take the cores of the engines.
            self._executor = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="tokenizer")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, self.encode, text, add_special_tokens)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise EngineDeadError("the engine client was shut down") from None  # by `close`, before a thread took it

    def close(self) -> None:
        """Lets the threads end after what they are doing; what waits for one fails. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None


def _load_template(directory: Path, chat_template_file: str | None) -> str | None:
    if chat_template_file is not None:
        if not Path(chat_template_file).is_file():
            raise ConfigError(f"--chat-template must name a file, got {chat_template_file!r}")
        return _read_text(Path(chat_template_file))
    if (file := directory / "chat_template.jinja").is_file():
        return _read_text(file)
    file = directory / "tokenizer_config.json"
    template = read_json(file).get("chat_template")
    if isinstance(template, list):  # several by name
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
        if template is None:
            raise ConfigError(f"chat_template in {file} holds several templates, but none named 'default'")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"chat_template in {file} must be text, got {type(template).__name__}")
    return template


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat template {str(file)!r} cannot be read: {error}") from error


def _render(template: jinja2.Template, context: dict[str, Any]) -> str:
    pieces, num_chars = [], 0
    assert isinstance(template.environment, TemplateSandbox)
    template.environment.begin()
    try:
        for piece in template.generate(context):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS:
                raise InvalidRequestError(f"the chat template made more than {MAX_RENDERED_CHARS} characters", "messages")
    except _TEMPLATE_ERRORS as error:
        raise InvalidRequestError(f"the chat template refused the messages: {error}", "messages") from error
    return "".join(pieces)


def _cut_behind_final_message(text: str) -> str:
    cut = text.rfind(_END_OF_CONTENT)
    if cut < 0:
        raise InvalidRequestError(
            "continue_final_message: the chat template does not show the final message's content", "continue_final_message"
        )
    return text[:cut].replace(_END_OF_CONTENT, "")  # a template may show it elsewhere, too


def _raise_exception(message: str) -> NoReturn:
    """How a template says that it cannot take the messages."""
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlock(Extension):
    """`{% generation %}`: marks the assistant's words for training; here it is what it holds."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's declaration is no ClassVar

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
