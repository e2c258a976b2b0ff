from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.core_client.fake_group import FakeGroup


@pytest.fixture
async def idle_group(request: pytest.FixtureRequest) -> AsyncIterator[FakeGroup]:
    """Whose client has not been started, in its first life if the test does not say another."""
    with tempfile.TemporaryDirectory(prefix="gw-", dir="/tmp") as directory:  # a Unix socket's path must be short
        group = FakeGroup(Path(directory), life=getattr(request, "param", 1))
        yield group
        group.client.ledger.check_invariants()
        await group.close()


@pytest.fixture
async def group(idle_group: FakeGroup) -> FakeGroup:
    await idle_group.start()
    return idle_group
