"""Reads the status documents of endpoints. Knows HTTP, not what is shown of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import msgspec

from gateway.status import StatusSnapshot

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What one look at one endpoint gave: a status or why there is none."""

    url: str
    status: StatusSnapshot | None = None
    document: dict[str, Any] | None = None  # as it came, with fields that this version does not know
    error: str | None = None


class StatusFeed:
    """One HTTP session for all endpoints; use it as a context manager."""

    def __init__(self, urls: Sequence[str], api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(self, *_error: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def read(self) -> list[Reading]:
        """All endpoints at once, in their order. Never raises for an endpoint that cannot be read."""
        return list(await asyncio.gather(*map(self._read_one, self._urls)))

    async def _read_one(self, url: str) -> Reading:
        assert self._session is not None
        try:
            async with self._session.get(f"{url}/status") as response:
                if response.status == 401:
                    return Reading(url, error="wrong or missing key; use --api-key")
                body = await response.read()
                if response.status != 200:
                    return Reading(url, error=f"answered {response.status} {response.reason}")
        except TimeoutError:
            return Reading(url, error=f"no answer within {self._timeout.total:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Reading(url, error=_reason(error))
        return parse(url, body)


def _reason(error: aiohttp.ClientError | OSError) -> str:
    """Short: the address stands beside it already."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def parse(url: str, body: bytes) -> Reading:
    """A document of any version: fields that are missing have their defaults, unknown ones are kept in `document` only."""
    try:
        document = msgspec.json.decode(body, type=dict[str, Any])
        status = msgspec.convert(document, StatusSnapshot)
    except msgspec.MsgspecError as error:
        return Reading(url, error=f"is no gateway: its status document is not one ({error})")
    return Reading(url, status, document)


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
