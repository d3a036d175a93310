"""A front that listens on a real socket, with a scripted Scheduler behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from freetoken.messages import ActorName, SubmitRequest
from freetoken.serving.control import Control
from freetoken.serving.front import ApiFrontService
from freetoken.serving.tokenizer import Tokenizer, load_text_model
from freetoken.testing.front_fakes import (
    ScriptedScheduler,
    make_front_spec,
    scripted_reply,
    wire_pair,
    write_text_checkpoint,
)
from freetoken.transport.inprocess import InProcessHub


@dataclass
class Site:
    """A running front. ``reply`` is the text that every request is answered with (by default)."""

    front: ApiFrontService
    scheduler: ScriptedScheduler
    session: aiohttp.ClientSession
    tokenizer: Tokenizer
    reply: str = "hello world"
    tokens_per_step: int = 1
    num_cached_tokens: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def script(self, request: SubmitRequest) -> Any:
        return scripted_reply(request, self.ids(self.reply), self.tokens_per_step, self.num_cached_tokens)

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        """(status, parsed body)."""
        given = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.post(path, **given, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.get(path, **kwargs) as response:
            return response.status, await response.json()

    async def chat(self, content: Any = "hi", **fields: Any) -> tuple[int, Any]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}
        return await self.post("/v1/chat/completions", body)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", {"model": "tiny", "prompt": prompt, **fields})


SiteFactory = Callable[..., Any]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return load_text_model(checkpoint).tokenizer


@asynccontextmanager
async def open_site(
    checkpoint: Path, control: Control | None = None, resumed: bool = True, context_tokens: int = 512, **settings: Any
) -> AsyncIterator[Site]:
    spec = make_front_spec(checkpoint, context_tokens, **settings)
    hub = InProcessHub(encode=True)
    front_end, scheduler_end = hub.endpoint(ActorName.API_FRONT), hub.endpoint(ActorName.SCHEDULER)
    front = ApiFrontService(spec, front_end, control)
    scheduler = ScriptedScheduler(scheduler_end)
    try:
        await front.load()
        await front.wire(await wire_pair(front_end, scheduler_end))
        if resumed:
            await front.resume()
        async with aiohttp.ClientSession(front.url) as session:
            site = Site(front, scheduler, session, load_text_model(checkpoint).tokenizer)
            scheduler.script = site.script
            yield site
    finally:
        await front.close()
        await scheduler.close()


@pytest.fixture
async def site(checkpoint: Path) -> AsyncIterator[Site]:
    async with open_site(checkpoint) as opened:
        yield opened
