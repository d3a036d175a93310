"""A Controller over fake services in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from freetoken.testing.fake_group import FakeGroup
from freetoken.testing.waiting import open_fds


@pytest.fixture
async def group(tmp_path: Path) -> AsyncIterator[FakeGroup]:
    before = open_fds()
    group = FakeGroup(tmp_path)
    yield group
    await group.stop()
    assert open_fds() <= before
