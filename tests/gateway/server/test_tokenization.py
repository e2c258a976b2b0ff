"""`/tokenize` and `/detokenize`, with vLLM's fields."""

from __future__ import annotations

from typing import Any


async def test_text_becomes_ids_and_ids_text_again(serve: Any) -> None:
    served = await serve()
    status, body, _ = await served.post("/tokenize", {"model": "fake", "prompt": "hé", "return_token_strs": True})
    assert status == 200
    assert body == {"count": 3, "max_model_len": 1000, "tokens": [1, 104, 233], "token_strs": ["\x01", "h", "é"]}
    _, body, _ = await served.post("/tokenize", {"prompt": "hé", "add_special_tokens": False})
    assert (body["tokens"], body["token_strs"]) == ([104, 233], None)
    assert (await served.post("/detokenize", {"tokens": [104, 233]}))[1] == {"prompt": "hé"}


async def test_messages_go_through_the_chat_template_without_special_tokens(serve: Any) -> None:
    served = await serve()
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    _, body, _ = await served.post("/tokenize", {"messages": messages, "chat_template_kwargs": {"a": 1}})
    assert "".join(map(chr, body["tokens"])) == "<user>hi<assistant>"
    assert served.engine.fake_renderer.rendered[0]["chat_template_kwargs"] == {"a": 1}
    _, body, _ = await served.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert "".join(map(chr, body["tokens"])) == "<user>hi"


async def test_bad_requests_name_the_field(serve: Any) -> None:
    served = await serve()
    for path, body, param in [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a" * 1001}, "prompt"),  # it would take time and memory without bound
        ("/detokenize", {"tokens": [97] * 1001}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [0x110000]}, "tokens"),
    ]:
        status, answer, _ = await served.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param), (path, body)
