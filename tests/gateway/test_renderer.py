"""Chat templates and encoding."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cores.config import ConfigError
from cores.testing import make_tiny_model_dir, make_tiny_tokenizer
from gateway.errors import InvalidRequestError
from gateway.renderer import LONG_TEXT_CHARS, MAX_RENDERED_CHARS, Renderer
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
    assert not renderer.has_chat_template
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


async def test_a_long_text_leaves_the_loop_free() -> None:
    class SlowTokenizer(Tokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert threading.current_thread() is not threading.main_thread()
            assert go_on.wait(timeout=60)
            return super().encode(text, add_special_tokens)

    go_on = threading.Event()
    renderer = Renderer(SlowTokenizer(make_tiny_tokenizer()), None)
    encoding = asyncio.create_task(renderer.encode_async("a" * (LONG_TEXT_CHARS + 1), False))
    await asyncio.sleep(0)
    assert not encoding.done()  # and we are here: the loop turns
    go_on.set()
    assert len(await encoding) == LONG_TEXT_CHARS + 1
    renderer.close()


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
