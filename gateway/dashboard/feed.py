"""Reads the status documents of endpoints. Knows HTTP, not what is shown of them."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import msgspec

from gateway.endpoint_url import http_base, make_connector, reason
from gateway.status import StatusSnapshot

TIMEOUT_S = 5.0
WRONG_KEY = "wrong or missing key; use --api-key"
REFUSED_S = 10.0  # until an endpoint that wants another key is asked again: only its start with other keys helps


@dataclass(frozen=True, slots=True)
class Reading:
    """What one look at one endpoint gave: a status or why there is none."""

    url: str
    status: StatusSnapshot | None = None
    body: bytes | None = None  # the document as it came, with fields that this version does not know
    error: str | None = None

    @property
    def document(self) -> dict[str, Any] | None:
        if self.body is None:
            return None
        document: dict[str, Any] = msgspec.json.decode(self.body)
        return document


class StatusFeed:
    """An HTTP session for each endpoint; use it as a context manager."""

    def __init__(
        self,
        urls: Sequence[str],
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._sessions: list[aiohttp.ClientSession] = []
        self.latest = [Reading(url, error="was not asked yet") for url in self.urls]
        self._clock = clock
        self._refused_s: dict[int, float] = {}  # by index: when one refused our key

    async def __aenter__(self) -> Self:
        self._sessions = [
            aiohttp.ClientSession(connector=make_connector(url), headers=self._headers, timeout=self._timeout)
            for url in self.urls
        ]
        return self

    async def __aexit__(self, *_error: object) -> None:
        for session in self._sessions:
            await session.close()

    async def read_all(self) -> list[Reading]:
        """All endpoints at once, in their order."""
        return list(await asyncio.gather(*map(self.read, range(len(self.urls)))))

    async def read(self, index: int) -> Reading:
        """One of them; after a refusal of our key its last answer, for a while. Never raises for one that cannot be read."""
        if index in self._refused_s and self._clock() - self._refused_s[index] < REFUSED_S:
            return self.latest[index]
        reading = self.latest[index] = await self._read_one(self.urls[index], self._sessions[index])
        self._refused_s.pop(index, None)
        if reading.error == WRONG_KEY:
            self._refused_s[index] = self._clock()
        return reading

    @property
    def exit_code(self) -> int:
        """Of what was read last."""
        return exit_code(self.latest)

    async def _read_one(self, url: str, session: aiohttp.ClientSession) -> Reading:
        try:
            async with session.get(f"{http_base(url)}/status") as response:
                if response.status == 401:
                    return Reading(url, error=WRONG_KEY)
                body = await response.read()
                if response.status != 200:
                    return Reading(url, error=f"answered {response.status} {response.reason}")
        except TimeoutError:
            return Reading(url, error=f"no answer within {self._timeout.total:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Reading(url, error=reason(error, url))
        return parse(url, body)


_decoder = msgspec.json.Decoder(StatusSnapshot)


def parse(url: str, body: bytes) -> Reading:
    """A document of any version: what is missing or not understood has its default, unknown fields are in `document` only."""
    try:
        return Reading(url, _decoder.decode(body), body)
    except msgspec.ValidationError:
        pass  # of another version, or no such document at all
    except msgspec.MsgspecError as error:
        return Reading(url, error=f"is no gateway: its status document is not one ({error})")
    document = msgspec.json.decode(body)
    if not isinstance(document, dict) or not isinstance(document.get("state"), str):
        return Reading(url, error="is no gateway: its status document has no state")
    return Reading(url, _as_far_as_understood(StatusSnapshot, document), body)


_ZEROS: dict[Any, Any] = {str: "", int: 0, float: 0.0}


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _as_far_as_understood(kind: Any, document: Mapping[str, Any]) -> Any:
    """A dataclass from a document of another version, field by field."""
    values = {}
    for field in dataclasses.fields(kind):
        known, value = _understood(_hints(kind)[field.name], document.get(field.name))
        if known:
            values[field.name] = value
        elif field.default is dataclasses.MISSING:
            values[field.name] = _ZEROS.get(_hints(kind)[field.name])
    return kind(**values)


def _understood(hint: Any, value: Any) -> tuple[bool, Any]:
    """Whether it is one, and the value."""
    if value is None:
        return isinstance(hint, types.UnionType), None
    if isinstance(hint, types.UnionType):
        hint = next(arm for arm in typing.get_args(hint) if arm is not types.NoneType)
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        item = typing.get_args(hint)[0]
        read = [_understood(item, each) for each in value]
        return True, tuple(each for known, each in read if known)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return True, _as_far_as_understood(hint, value)
    try:
        return True, msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError:
        return False, None


def exit_code(readings: Sequence[Reading]) -> int:
    """0 all ranks of all endpoints are ready, 1 some are not, 2 an endpoint is unreachable or dead."""
    statuses = [reading.status for reading in readings]
    if any(status is None or status.state == "dead" for status in statuses):
        return 2
    healthy = all(
        status is not None and status.state == "ready" and all(rank.state == "ready" for rank in status.ranks)
        for status in statuses
    )
    return 0 if healthy else 1
