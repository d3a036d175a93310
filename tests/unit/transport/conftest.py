"""The carriers under test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from freetoken.testing.carriers import CARRIERS, Network
from freetoken.testing.waiting import open_fds, until


@pytest.fixture(params=CARRIERS)
async def network(request: pytest.FixtureRequest) -> AsyncIterator[Network]:
    before = open_fds()
    network = Network(request.param)
    yield network
    for endpoint in network.endpoints:
        await network.end(endpoint)
    await until(lambda: open_fds() <= before)
