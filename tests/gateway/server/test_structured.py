"""From `response_format` and `structured_outputs` to what an engine is told, and the compiler's reason back to the client."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cores.sampling_params import OPTIONAL_FEATURES, SamplingParams, StructuredOutputKind, StructuredOutputs
from cores.testing import make_tiny_model_dir
from gateway.engine_client import ModelConfig, Prompt
from gateway.grammar_checker import GrammarChecker
from gateway.input_processor import InputProcessor
from gateway.outputs import RequestOutput
from gateway.renderer import Renderer
from gateway.server.sampling import to_sampling_params
from gateway.server.schema import BodyDecoder, ChatCompletionRequest
from gateway.testing import FakeEngineClient

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, COMPLETIONS: {"prompt": "Hi"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
decoder = BodyDecoder(ChatCompletionRequest)


def structured(**fields: Any) -> StructuredOutputs | None:
    return to_sampling_params(decoder.decode(json.dumps({"messages": [], **fields}).encode()), {}).structured_outputs


def wrapped(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def test_free_text_is_the_default() -> None:
    for fields in ({}, {"response_format": None}, {"response_format": {"type": "text"}}, {"structured_outputs": None}):
        assert structured(**fields) is None


def test_openai_s_formats() -> None:
    wanted = structured(response_format=wrapped(SCHEMA, strict=True, description="d"))
    assert wanted is not None
    assert (wanted.kind, json.loads(wanted.spec), wanted.param) == (StructuredOutputKind.JSON, SCHEMA, "response_format")
    any_object = structured(response_format={"type": "json_object"})
    assert any_object == StructuredOutputs(StructuredOutputKind.JSON, '{"type":"object"}', "response_format")


@pytest.mark.parametrize(
    ("fields", "kind", "spec"),
    [
        ({"json": SCHEMA}, StructuredOutputKind.JSON, SCHEMA),
        ({"json": json.dumps(SCHEMA)}, StructuredOutputKind.JSON, SCHEMA),
        ({"json_object": True, "json": None}, StructuredOutputKind.JSON, {"type": "object"}),
        ({"regex": "a+", "json_object": False}, StructuredOutputKind.REGEX, "a+"),
        ({"choice": ["a", "é"], "disable_fallback": True}, StructuredOutputKind.CHOICE, ["a", "é"]),
        ({"grammar": "root ::= [a]"}, StructuredOutputKind.GRAMMAR, "root ::= [a]"),
        (
            {"json": SCHEMA, "disable_any_whitespace": True},
            StructuredOutputKind.JSON,
            SCHEMA | {"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}},
        ),
        (
            {"json": SCHEMA, "whitespace_pattern": " ?"},
            StructuredOutputKind.JSON,
            SCHEMA | {"x-guidance": {"whitespace_pattern": " ?"}},
        ),
    ],
)
def test_vllm_s_fields(fields: dict[str, Any], kind: StructuredOutputKind, spec: Any) -> None:
    wanted = structured(structured_outputs=fields)
    assert wanted is not None
    assert (wanted.kind, wanted.param) == (kind, "structured_outputs")
    assert (wanted.spec if isinstance(spec, str) else json.loads(wanted.spec)) == spec


class CheckingEngineClient(FakeEngineClient):
    """A fake engine behind the real input processor and a real compiler."""

    def __init__(self, model: Path, features: tuple[str, ...] = OPTIONAL_FEATURES) -> None:
        super().__init__()
        renderer = Renderer.from_directory(model)
        config = ModelConfig("tiny", str(model), 2048, 484, (2, 0), created=0, features=features)
        self.checker = GrammarChecker(config)
        self.input_processor = InputProcessor(config, renderer, random.Random(0), check_grammar=self.checker.check)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        await self.input_processor.process([5, 6], sampling_params)
        async for output in super().generate(prompt, sampling_params, request_id, **options):
            yield output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[CheckingEngineClient]:
    engine = CheckingEngineClient(model)
    yield engine
    await engine.checker.close()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_cannot_be_compiled_is_a_400_with_the_reason(
    serve: Any, engine: CheckingEngineClient, path: str, stream: bool
) -> None:
    served = await serve()
    served.state.engine = engine
    for fields, param, reason in (
        ({"response_format": wrapped({"type": "integerr"})}, "response_format", "Invalid type: integerr"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "a choice needs a list of at least one text"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs", 'unknown name: "x"'),
        ({"response_format": wrapped({"description": "x" * 140_000})}, "response_format", "between 1 and 131072 characters"),
    ):
        status, answer, _ = await served.post(path, BODIES[path] | fields | {"stream": stream})
        error = answer["error"]
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert reason in error["message"]
        assert error["message"].startswith(param)
    assert engine.requests == []
    status, _, _ = await served.post(path, BODIES[path] | {"response_format": wrapped(SCHEMA)})
    assert (status, len(engine.requests)) == (200, 1)


async def test_an_engine_without_logits_is_not_asked_for_what_needs_them(serve: Any, model: Path) -> None:
    served = await serve()
    served.state.engine = CheckingEngineClient(model, features=())
    for fields, param in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprobs": 1}, "logprobs"),
    ):
        status, answer, _ = await served.post(COMPLETIONS, BODIES[COMPLETIONS] | fields)
        assert (status, answer["error"]["param"]) == (400, param)
        assert answer["error"]["message"] == f"{param} is not supported by this server's engines"
