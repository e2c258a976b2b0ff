"""docs/api.md says what the server does: its routes, the fields of its bodies, the codes of its errors."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from gateway.config import GatewayConfig, ServerConfig
from gateway.server import ServerState
from gateway.server.app import create_app
from gateway.server.auth import OPEN_PATHS
from gateway.server.responses.schema import ResponsesRequest
from gateway.server.routes.admin import RestartRequest, ScaleRequest
from gateway.server.routes.development import AbortRequestsRequest, CollectiveRpcRequest, UpdateWeightsRequest
from gateway.server.routes.requests import CancelRequest
from gateway.server.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    LoadLoraAdapterRequest,
    TokenizeRequest,
    UnloadLoraAdapterRequest,
)

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = (ROOT / "docs/api.md").read_text()
BODIES: dict[str, type[msgspec.Struct]] = {
    "Fields of both completions": GenerationRequest,
    "POST /v1/chat/completions": ChatCompletionRequest,
    "POST /v1/completions": CompletionRequest,
    "POST /v1/responses": ResponsesRequest,
    "POST /v1/embeddings": EmbeddingRequest,
    "POST /v1/requests/cancel": CancelRequest,
    "POST /tokenize": TokenizeRequest,
    "POST /detokenize": DetokenizeRequest,
    "POST /v1/load_lora_adapter": LoadLoraAdapterRequest,
    "POST /v1/unload_lora_adapter": UnloadLoraAdapterRequest,
    "POST /admin/ranks/{rank}/restart": RestartRequest,
    "POST /scale_elastic_ep": ScaleRequest,
    "POST /update_weights": UpdateWeightsRequest,
    "POST /abort_requests": AbortRequestsRequest,
    "POST /collective_rpc": CollectiveRpcRequest,
}


def section(title: str) -> str:
    """From its heading to the next one."""
    after = re.split(rf"^#+ {re.escape(title)}$", DOCUMENT, flags=re.MULTILINE)[1]
    return re.split(r"^#+ ", after, flags=re.MULTILINE)[0]


def first_cells(text: str) -> list[str]:
    return [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]


def registered(*, dev_mode: bool) -> set[str]:
    app = create_app(ServerState(GatewayConfig(server=ServerConfig(dev_mode=dev_mode))))
    return {
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if isinstance(route, web.ResourceRoute) and route.resource is not None and route.method != "HEAD"
    }


def test_every_route_is_in_the_tables_and_no_other() -> None:
    always, in_dev_mode = section("Routes").split("With `--dev-mode` alone")
    usual = registered(dev_mode=False)
    assert {cell.strip(" `") for cell in first_cells(always)} == usual
    assert {cell.strip(" `") for cell in first_cells(in_dev_mode)} == registered(dev_mode=True) - usual


def test_the_routes_that_need_a_key_are_those_that_say_so() -> None:
    rows = [line.split("|") for line in section("Routes").splitlines() if re.match(r"\| `\w+ [^|]+\| (yes|no) \|", line)]
    needs_none = {cells[1].strip(" `").partition(" ")[2] for cells in rows if cells[2].strip() == "no"}
    assert needs_none == OPEN_PATHS


@pytest.mark.parametrize("title", BODIES)
def test_every_field_of_a_body_is_in_its_table_and_no_other(title: str) -> None:
    body = BODIES[title]
    shared = set(GenerationRequest.__struct_fields__) if body is not GenerationRequest else set()
    own = set(body.__struct_fields__) - (shared if issubclass(body, GenerationRequest) else set())
    assert {name for cell in first_cells(section(title)) for name in re.findall(r"`(\w+)`", cell)} == own


def test_every_code_of_an_error_is_in_the_table_and_no_other() -> None:
    sources = [path.read_text() for path in (ROOT / "gateway").rglob("*.py")]
    given = {code for text in sources for code in re.findall(r'\bcode="(\w+)"', text)}
    codes = {
        code
        for line in section("Errors").splitlines()
        if line.startswith("| ")
        for code in re.findall(r"`(\w+)`", line.split("|")[3])
    }
    assert codes - {"code"} == given
