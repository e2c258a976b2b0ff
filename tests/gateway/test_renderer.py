"""Chat templates and encoding."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError

from cores.config import ConfigError
from cores.testing import make_tiny_model_dir, make_tiny_tokenizer
from gateway.errors import EngineDeadError, InvalidRequestError
from gateway.renderer import LONG_TEXT_CHARS, MAX_RENDERED_CHARS, MAX_THREADS, Renderer
from gateway.template_sandbox import TemplateSandbox
from gateway.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "hello"}]


def make_renderer(template: str | None) -> Renderer:
    tokenizer = Tokenizer(make_tiny_tokenizer(), bos_token="<|im_start|>", eos_token="<|im_end|>")
    return Renderer(tokenizer, template, clock=lambda: datetime(2026, 3, 4))


def render(template: str, messages: list[dict[str, Any]] = HELLO, **kwargs: Any) -> str:
    return make_renderer(template).render_chat(messages, **kwargs)


# --- templates --------------------------------------------------------------------------------------------------------


def test_a_model_directory_chats(tmp_path: Path) -> None:
    renderer = Renderer.from_directory(make_tiny_model_dir(tmp_path))
    text = renderer.render_chat([{"role": "system", "content": "be brief"}, *HELLO])
    assert text == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.encode(text, add_special_tokens=False)[0] == 1  # special tokens written out are special tokens
    assert renderer.render_chat(HELLO, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"


def test_templates_see_what_those_of_transformers_see() -> None:
    template = (
        "{{ bos_token }}|{{ eos_token }}|{{ strftime_now('%d %b %Y') }}|{{ tools[0] | tojson }}|{{ tools is none }}"
        "|{{ enable_thinking }}|{% generation %}{{ messages[0].content }}{% endgeneration %}"
        "{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    text = render(template, tools=[{"name": "<é>"}], chat_template_kwargs={"enable_thinking": False})
    assert text == '<|im_start|>|<|im_end|>|04 Mar 2026|{"name": "<é>"}|False|False|hello01'


def test_block_lines_leave_no_blank_lines() -> None:
    assert render("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n") == "user\n"


def test_no_tools_is_none() -> None:
    assert render("{{ tools is none }}", tools=[]) == "True"


def test_the_template_file_wins_over_the_models_own(tmp_path: Path) -> None:
    path = make_tiny_model_dir(tmp_path / "model")
    file = tmp_path / "mine.jinja"
    file.write_text("mine: {{ messages[0].content }}")
    assert Renderer.from_directory(path, str(file)).render_chat(HELLO) == "mine: hello"


@pytest.mark.parametrize(
    "value", ["from the config", [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "from the config"}]]
)
def test_older_directories_keep_the_template_in_their_config(tmp_path: Path, value: Any) -> None:
    path = make_tiny_model_dir(tmp_path)
    (path / "chat_template.jinja").unlink()
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": value}))
    assert Renderer.from_directory(path).render_chat(HELLO) == "from the config"


@pytest.mark.parametrize("value", [5, [], [{"name": "tool_use", "template": "x"}]])
def test_a_config_with_no_usable_template_is_named(tmp_path: Path, value: Any) -> None:
    path = make_tiny_model_dir(tmp_path)
    (path / "chat_template.jinja").unlink()
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ConfigError, match=r"chat_template in .*tokenizer_config\.json"):
        Renderer.from_directory(path)


def test_a_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    path = make_tiny_model_dir(tmp_path)
    (path / "chat_template.jinja").unlink()
    renderer = Renderer.from_directory(path)
    with pytest.raises(InvalidRequestError, match="--chat-template FILE"):
        renderer.render_chat(HELLO)


def test_a_missing_or_broken_template_file_stops_the_start(tmp_path: Path) -> None:
    path = make_tiny_model_dir(tmp_path / "model")
    with pytest.raises(ConfigError, match="--chat-template must name a file, got 'nowhere'"):
        Renderer.from_directory(path, "nowhere")
    (path / "chat_template.jinja").write_text("line one\n{% for %}")
    with pytest.raises(ConfigError, match="broken in line 2"):
        Renderer.from_directory(path)
    (path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        Renderer.from_directory(path)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ messages[5].content }}", "no element 5"),
    ],
)
def test_a_template_that_fails_is_a_bad_request_with_its_reason(template: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"the chat template refused the messages: .*{message}"):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append('x') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template: str) -> None:
    with pytest.raises(InvalidRequestError):
        render(template)


def test_a_template_that_loops_is_stopped_by_the_size_of_its_output() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'xxxxxxxx' * 4096 }}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match=str(MAX_RENDERED_CHARS)):
        render(endless)


BOMBS = [
    # Time: no output, so its size stops nothing.
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
    "{% for a in [[[]]] recursive %}{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
    # Memory.
    "{% set n = 2 * 10 ** 7 %}{{ 'x' * n }}",
    "{% set n = 2 * 10 ** 7 %}{{ n * 'x' }}{{ n * [1] }}",
    "{{ 10 ** (10 ** 10) }}",
    "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('x', 'x' * 99) %}{% endfor %}",
    "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x | replace('x', 'x' * 99) %}{% endfor %}",
    "{% set x = 'x' * 10000000 %}{{ ([x] * 1000) | join }}",
    "{% set x = 'x' * 10000000 %}{{ ''.join([x] * 1000) }}",
    "{% set n = 2 * 10 ** 7 %}{{ 'x' | center(n) }}",
    "{% set n = 2 * 10 ** 7 %}{{ 'x'.ljust(n) }}",
    "{% set n = 2 * 10 ** 7 %}{{ 'x'.zfill(n) }}",
    "{% set n = 2 * 10 ** 7 %}{{ 'x' | indent(n, first=true) }}",
    "{% set n = 2 * 10 ** 7 %}{{ [1] | tojson(indent=n) }}",
    "{% set n = 2 * 10 ** 7 %}{{ [1] | batch(n, 0) | list }}",
    "{{ '{:>20000000}'.format('x') }}",
    "{% set n = 2 * 10 ** 7 %}{{ '{:>{w}}'.format('x', w=n) }}",
    "{{ '%20000000d' % 5 }}",
    "{{ '%*d' % (20000000, 5) }}",
    "{% set x = 'x\\n' * 1000000 %}{{ x | indent(99999) }}",
    # Memory, by naming one value often.
    "{% set x = 'x' * 1000000 %}{{ [x] * 1000 }}",
    "{% set x = 'x' * 1000000 %}{{ [[x] * 1000] * 1000 ~ '' }}",
    "{% set x = 'x' * 1000000 %}{{ ([x] * 1000) | string | length }}",
    "{% set x = 'x' * 1000000 %}{{ ([x] * 1000) | tojson | length }}",
    "{% set x = 'x' * 1000000 %}{{ namespace(x=[x] * 1000) | string | length }}",
    "{% set x = 'x' * 1000000 %}{{ ('%s' % ([x] * 1000,)) | length }}",
    "{% set x = 'x' * 1000000 %}{{ '{}'.format([x] * 1000) | length }}",
    "{% set x = 'x' * 1000000 %}{{ {'k': [x] * 1000}.values() | string | length }}",
    "{% set ns = namespace(x=1) %}{% set ns.x = ns %}{{ ns | string }}",
    "{{ ([[0] * 1000000] * 1000) | sum(start=[]) | length }}",
    "{{ lipsum(999999999) }}",
]


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_in_a_template_is_refused_before_it_takes_time_or_memory(bomb: str) -> None:
    with pytest.raises(InvalidRequestError, match="the chat template refused the messages"):
        render(bomb)


# None of these values is long, and together they have a hundred times the budget.
HOARDS = [
    "{{ ([x] * 10000) | map('upper') | list | length }}",
    "{{ ([x] * 10000) | map('upper') | join | length }}",
    "{{ ''.join(([x] * 10000) | map('upper')) | length }}",
    *(
        f"{{% set ns = namespace(all=[]) %}}{{% for i in range(10000) %}}{{% set ns.all = [ns.all, {value}] %}}{{% endfor %}}"
        for value in (
            "x ~ i", "x + 'y'", "x * 1", "x[1:]", "x | title", "x.lower()", "x | list", "x | string", "x | trim", "x | e",
            "x.split('y')", "'%s!' % x", "'{}'.format(x)", "[x, x] | tojson", "x.replace('y', '')", "([0] * 200)[1:]",
            "([0] * 200).copy()",
        )
    ),
    "{% set kept %}{% for i in range(10000) %}{{ x }}{% endfor %}{% endset %}",
]  # fmt: skip


@pytest.mark.parametrize("hoard", HOARDS)
def test_a_template_cannot_hoard_many_values_none_of_which_is_too_long(hoard: str) -> None:
    sandbox = TemplateSandbox(max_total_len=100_000)
    template = sandbox.template(hoard)
    sandbox.begin()
    with pytest.raises(SecurityError, match="values of more than 100000 characters in all"):
        template.render(x="x" * 1000)


def test_the_budget_of_values_is_of_one_rendering_and_looking_costs_nothing() -> None:
    sandbox = TemplateSandbox(max_total_len=30_000)
    template = sandbox.template(
        "{% for i in range(1000) %}{% if x.startswith('y') or x | length < 9 or [x] | first == '' %}{% endif %}{% endfor %}"
        "{{ (x + x)[1:-1:2] | length }}{{ x | upper | last }}{{ x[:3] }}"
    )
    for _ in range(10):
        sandbox.begin()
        assert template.render(x="x" * 1000) == "999Xxxx"


def test_a_break_outside_of_loops_is_a_broken_template() -> None:
    with pytest.raises(ConfigError, match="the chat template is broken in line 1: 'break' outside loop"):
        make_renderer("{% break %}")


def test_what_real_templates_do_is_not_taken_for_a_bomb() -> None:
    harmless = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n ~ '. ' + m.content | trim }}"
        "{% endfor %}{{ '%s of %d %%' % ('ab', 5) }}{{ '{:>5}'.format('x') }}{{ '-' * 3 }}{{ ['a', 'b'] | join(', ') }}"
        "{{ 2 ** 3 }}{{ 'a-b'.replace('-', '+') | upper }}{{ {'k': [1]} | tojson }}{{ 7 % 4 }}{{ 'x' | indent(2, true) }}"
    )
    assert render(harmless, [{"role": "user", "content": " hi "}]) == '1. hiab of 5 %    x---a, b8A+B{"k": [1]}3  x'


PLAIN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = make_renderer(PLAIN_TEMPLATE)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)
MESSAGE = st.one_of(
    ANYTHING,
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool", ""]), "content": ANYTHING}),
)


@given(messages=st.lists(MESSAGE, max_size=4), kwargs=st.dictionaries(st.text(max_size=8), ANYTHING, max_size=2))
@settings(max_examples=300)
def test_any_chat_is_rendered_or_refused(messages: list[Any], kwargs: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequestError):
        assert isinstance(PLAIN.render_chat(messages, chat_template_kwargs=kwargs), str)


PIECES = st.sampled_from(
    [
        "{{ messages }}", "{% for m in messages %}", "{% endfor %}", "{% if m.role %}", "{% endif %}", "{{ m.content + 'x' }}",
        "{{ m ~ 1 }}", "{{ x * 3 }}", "{{ messages[9].y }}", "{% macro f(a) %}", "{% endmacro %}", "{{ f(1) }}", "{{ 1 / 0 }}",
        "{{ m | tojson }}", "{% set x = messages %}", "{{ loop.index }}", "{% break %}", "{{ x.__class__ }}", "{{ -x }}",
        "{{ [] | first }}", "{{ raise_exception('no') }}", "{{ 'é' | upper }}", "{{ strftime_now('%Y') }}", "{%", "}}", "{# #}",
        "{% generation %}", "{% endgeneration %}",
    ]
)  # fmt: skip


@given(pieces=st.lists(PIECES, max_size=8))
@settings(max_examples=500)
def test_any_template_is_rendered_or_refused(pieces: list[str]) -> None:
    with contextlib.suppress(ConfigError, InvalidRequestError):
        assert isinstance(render("".join(pieces)), str)


def test_messages_are_checked_before_the_template_sees_them() -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content\[0\]: image input is not supported"):
        render("{{ messages }}", [{"role": "user", "content": [{"type": "image_url"}]}])


@pytest.mark.parametrize("key", ["messages", "add_generation_prompt", "chat_template"])
def test_template_arguments_cannot_replace_the_chat(key: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"chat_template_kwargs must not set '{key}'"):
        render("x", chat_template_kwargs={key: "y"})


# --- the final message continued --------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two, "}]


def test_a_continued_message_ends_the_prompt_exactly(tmp_path: Path) -> None:
    renderer = Renderer.from_directory(make_tiny_model_dir(tmp_path))
    text = renderer.render_chat(CHAT, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|im_start|>user\ncount<|im_end|>\n<|im_start|>assistant\none, two, "
    assert CHAT[-1]["content"] == "one, two, "


def test_a_template_that_trims_still_ends_with_the_message() -> None:
    template = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert render(template, CHAT, add_generation_prompt=False, continue_final_message=True) == "[count][one, two, "


def test_a_template_that_shows_the_final_message_twice_ends_with_the_second() -> None:
    template = "about {{ messages[-1].content }}: [{{ messages[-1].content }}]"
    text = render(template, CHAT[1:], add_generation_prompt=False, continue_final_message=True)
    assert text == "about one, two, : [one, two, "


def test_a_template_that_hides_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequestError, match="does not show the final message") as caught:
        render("{{ messages[0].content }}", CHAT, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_continuing_and_prompting_exclude_each_other() -> None:
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        render("x", continue_final_message=True, add_generation_prompt=True)


# --- encoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_chars", [10, LONG_TEXT_CHARS + 1])
async def test_long_and_short_texts_encode_alike(num_chars: int) -> None:
    renderer = make_renderer(None)
    text = ("the way " * num_chars)[:num_chars]
    assert await renderer.encode_async(text, False) == renderer.encode(text, False)
    renderer.close()
    renderer.close()


class SlowTokenizer(Tokenizer):
    """Encodes, in a thread, when it is told to."""

    def __init__(self) -> None:
        super().__init__(make_tiny_tokenizer())
        self.go_on = threading.Event()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert threading.current_thread() is not threading.main_thread()
        assert self.go_on.wait(timeout=60)
        return super().encode(text, add_special_tokens)


async def test_a_long_text_leaves_the_loop_free() -> None:
    tokenizer = SlowTokenizer()
    renderer = Renderer(tokenizer, None)
    encoding = asyncio.create_task(renderer.encode_async("a" * (LONG_TEXT_CHARS + 1), False))
    await asyncio.sleep(0)
    assert not encoding.done()  # and we are here: the loop turns
    tokenizer.go_on.set()
    assert len(await encoding) == LONG_TEXT_CHARS + 1
    renderer.close()


async def test_texts_that_wait_for_a_thread_at_the_end_fail_and_do_not_look_cancelled() -> None:
    tokenizer = SlowTokenizer()
    renderer = Renderer(tokenizer, None)
    text = "a" * (LONG_TEXT_CHARS + 1)
    encodings = [asyncio.create_task(renderer.encode_async(text, False)) for _ in range(MAX_THREADS + 2)]
    await asyncio.sleep(0)
    encodings[-1].cancel()  # its reader has left
    await asyncio.wait({encodings[-1]})
    assert encodings[-1].cancelled()
    renderer.close()
    await asyncio.wait({encodings[-2]})
    with pytest.raises(EngineDeadError, match="shut down"):
        encodings[-2].result()
    tokenizer.go_on.set()
    assert len(await encodings[0]) == LONG_TEXT_CHARS + 1  # it had a thread
    await asyncio.gather(*encodings, return_exceptions=True)


async def test_bad_text_is_refused_from_the_thread_too() -> None:
    renderer = make_renderer(None)
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        await renderer.encode_async("a" * LONG_TEXT_CHARS + "\udc00", False)
    renderer.close()


async def test_the_loop_turns_while_a_long_prompt_is_tokenized() -> None:
    renderer = make_renderer(None)
    text = "".join(map(chr, range(0x100, 0x3000))) * 10  # half a second of work
    tokenizing = asyncio.create_task(renderer.encode_async(text, add_special_tokens=False))
    num_turns = 0
    while not tokenizing.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    renderer.close()
    assert num_turns > 5, "the tokenizer kept the interpreter's lock"


def test_the_servers_words_for_the_template_stand_where_a_request_has_none() -> None:
    tokenizer = Tokenizer(make_tiny_tokenizer(), bos_token=None, eos_token=None)
    renderer = Renderer(tokenizer, "{{ enable_thinking }} {{ mood }}", {"enable_thinking": False, "mood": "calm"})
    assert renderer.render_chat(HELLO) == "False calm"
    assert renderer.render_chat(HELLO, chat_template_kwargs={"enable_thinking": True}) == "True calm"
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs must not set 'messages'"):
        Renderer(tokenizer, None, {"messages": []})
