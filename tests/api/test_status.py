"""Health, actors, caches and metrics come from the actors."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from freetoken.messages import ActorName, ActorState, ActorStatus, HealthState, HealthView
from freetoken.serving import status as status_module
from freetoken.serving.document import render
from freetoken.telemetry.names import actor_label
from freetoken.testing.waiting import until

from .conftest import Site, open_site

ROOT = Path(__file__).resolve().parents[2]

METRICS: dict[ActorName, dict[str, float]] = {
    ActorName.SCHEDULER: {"running": 2.0, "waiting": 1.0, "steps_total": 9.0},
    ActorName.EXPERT_CACHE: {
        "slots": 8.0,
        "resident_slots": 5.0,
        "hits_total": 30.0,
        "fetches_total": 6.0,
        "cpu_total": 4.0,
        "hit_ratio": 0.75,
        "split_fetch_gbps": 12.25,
    },
    ActorName.KV_ALLOCATOR: {
        "blocks": 61.0,
        "free_blocks": 60.0,
        "block_size_tokens": 16.0,
        "hit_tokens_total": 16.0,
        "query_tokens_total": 64.0,
        "hit_ratio": 0.25,
    },
    ActorName.WEIGHT_STREAMER: {"loaded_bytes_total": 4096.0},
    ActorName.GPU_EXECUTOR: {"odd key!": 1.5, "not_finite": math.nan},
}


READY = HealthView(HealthState.READY)


@dataclass
class FakeControl:
    view: HealthView = READY
    error: Exception | None = None
    calls: list[str] = field(default_factory=list)
    statuses: list[ActorStatus] = field(
        default_factory=lambda: [
            ActorStatus(name, ActorState.SERVING, 100 + i, 3, 12.5, restarts=i, metrics=METRICS.get(name, {}))
            for i, name in enumerate(ActorName)
        ]
    )

    async def actors(self) -> list[ActorStatus]:
        self.calls.append("actors")
        if self.error:
            raise self.error
        return self.statuses

    async def health(self) -> HealthView:
        self.calls.append("health")
        if self.error:
            raise self.error
        return self.view


async def test_health_ready(checkpoint: Path) -> None:
    async with open_site(checkpoint, FakeControl()) as site:
        status, report = await site.get("/health")
        assert (status, report["status"], report["model"]) == (200, "ready", "tiny")
        assert report["requests"] == {"running": 2.0, "waiting": 1.0}
        assert report["actors"]["GpuExecutor"] == {"state": "serving", "epoch": 3, "restarts": 6}
        assert len(report["actors"]) == 8
        assert "progress" not in report


async def test_health_loading_with_progress(checkpoint: Path) -> None:
    view = HealthView(HealthState.LOADING, "reading weights", 256, 1024, "experts")
    async with open_site(checkpoint, FakeControl(view), resumed=False) as site:
        status, report = await site.get("/health")
        assert (status, report["status"], report["detail"]) == (503, "loading", "reading weights")
        assert report["progress"] == {"done_bytes": 256, "total_bytes": 1024, "fraction": 0.25, "what": "experts"}


@pytest.mark.parametrize(
    ("state", "expected"), [(HealthState.DEGRADED, "degraded"), (HealthState.STOPPING, "stopping")]
)
async def test_health_of_the_controller_counts(checkpoint: Path, state: HealthState, expected: str) -> None:
    async with open_site(checkpoint, FakeControl(HealthView(state, "why"))) as site:
        status, report = await site.get("/health")
        assert (status, report["status"], report["detail"]) == (503, expected, "why")


async def test_health_of_the_front_counts(checkpoint: Path) -> None:
    async with open_site(checkpoint, FakeControl()) as site:
        await site.front.pause("test")
        status, report = await site.get("/health")
        assert (status, report["status"]) == (503, "degraded")
        assert "test" in report["detail"]


async def test_health_sees_that_nothing_moves(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "FRESH_S", 0.0)
    control = FakeControl()
    index = list(ActorName).index(ActorName.SCHEDULER)
    async with open_site(checkpoint, control, scheduler={"step_timeout_s": 0.02}) as site:
        site.scheduler.script = None
        running = asyncio.ensure_future(site.complete())
        await until(lambda: site.scheduler.num_running == 1)

        async def degraded() -> Any:
            while True:
                status, report = await site.get("/health")
                if status == 503:
                    return report

        report = await asyncio.wait_for(degraded(), 20)
        assert report["status"] == "degraded"
        assert "2 requests running and 1 waiting" in report["detail"]
        moved = {**METRICS[ActorName.SCHEDULER], "steps_total": 10.0}
        control.statuses[index] = replace(control.statuses[index], metrics=moved)
        status, report = await site.get("/health")
        assert (status, report["stalled_s"]) == (200, 0.0)
        for delta in site.script(site.scheduler.submitted[0]):
            site.scheduler.send(delta)
        assert (await running)[0] == 200


async def test_idle_is_healthy(checkpoint: Path) -> None:
    async with open_site(checkpoint, FakeControl(), scheduler={"step_timeout_s": 1e-9}) as site:
        for _ in range(3):
            status, report = await site.get("/health")
            assert (status, report["stalled_s"]) == (200, 0.0)


async def test_a_silent_controller(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "FRESH_S", 0.0)
    control = FakeControl(error=RuntimeError("actor died"))
    async with open_site(checkpoint, control) as site:
        status, report = await site.get("/health")
        assert (status, report["status"]) == (503, "degraded")
        assert "actor died" in report["detail"]
        status, body = await site.get("/v1/actors")
        assert (status, [a["name"] for a in body["actors"]]) == (200, ["ApiFront"])
        assert (await site.complete())[0] == 200  # the engine serves on without it
        control.error = None
        assert (await site.get("/health"))[0] == 200


async def test_answers_are_shared(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "FRESH_S", 1000.0)
    control = FakeControl()
    async with open_site(checkpoint, control) as site:
        for _ in range(5):
            await site.get("/v1/actors")
        assert control.calls == ["actors"]


async def test_actors(checkpoint: Path) -> None:
    async with open_site(checkpoint, FakeControl()) as site:
        _, body = await site.get("/v1/actors")
        by_name = {actor["name"]: actor for actor in body["actors"]}
        assert set(by_name) == {name.value for name in ActorName}
        assert by_name["GpuExecutor"]["restarts"] == 6
        assert by_name["GpuExecutor"]["metrics"] == {"odd key!": 1.5, "not_finite": None}
        assert by_name["ApiFront"]["detail"] == site.front.url  # its own word, not the Controller's copy


async def test_cache_status(checkpoint: Path) -> None:
    async with open_site(checkpoint, FakeControl()) as site:
        status, body = await site.get("/v1/cache/status")
        assert status == 200
        assert body["plan"]["num_slots"] == 8
        assert body["plan"]["kv_capacity_tokens"] == 64 * 16
        assert body["experts"]["resident_slots"] == 5.0
        assert body["split"]["fetch_gbps"] == 12.25
        assert body["kv"]["free_blocks"] == 60.0
        assert body["kv"]["capacity_tokens"] == 61 * 16
        assert body["store"] == {"store_bytes": 1 << 22, "loaded_bytes_total": 4096.0}


async def test_cache_status_has_each_figure_once(checkpoint: Path) -> None:
    def leaves(value: Any) -> list[Any]:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return [value] if parts is None else [leaf for part in parts for leaf in leaves(part)]

    metrics = {
        name: {key: 1000.5 + 100 * index + place for place, key in enumerate(METRICS[name])}
        for index, name in enumerate((ActorName.EXPERT_CACHE, ActorName.KV_ALLOCATOR, ActorName.WEIGHT_STREAMER))
    }
    control = FakeControl()
    control.statuses = [replace(s, metrics=metrics.get(s.name, {})) for s in control.statuses]
    async with open_site(checkpoint, control) as site:
        _, body = await site.get("/v1/cache/status")
        told = leaves(body)
        for figures in metrics.values():
            for key, value in figures.items():
                assert told.count(value) == (key != "block_size_tokens"), key  # which the plan has


async def test_cache_status_without_the_actors_is_the_plan(checkpoint: Path) -> None:
    async with open_site(checkpoint, FakeControl(error=RuntimeError("actor died"))) as site:
        _, body = await site.get("/v1/cache/status")
        assert body["experts"] == {"slots": 8.0} and body["kv"] == {"capacity_tokens": 64 * 16}
        assert body["store"] == {"store_bytes": 1 << 22}


async def test_metrics(checkpoint: Path) -> None:
    async with open_site(checkpoint, FakeControl()) as site:
        await site.complete(max_tokens=3)
        await site.chat()
        async with site.session.get("/metrics") as response:
            assert response.content_type == "text/plain"
            text = await response.text()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples: dict[str, Any] = {}
    for family in families.values():
        for sample in family.samples:
            samples[(sample.name, *sorted(sample.labels.items()))] = sample.value
    assert samples["freetoken_expert_cache_hits_total",] == 30.0
    assert families["freetoken_expert_cache_hits"].type == "counter"
    assert families["freetoken_kv_allocator_free_blocks"].type == "gauge"
    assert samples["freetoken_gpu_executor_odd_key_",] == 1.5
    assert samples["freetoken_actor_up", ("actor", "Scheduler"), ("state", "serving")] == 1.0
    assert samples["freetoken_actor_restarts_total", ("actor", "ApiFront")] == 7.0
    assert samples["freetoken_api_front_requests_limit",] == 320.0
    assert samples["freetoken_output_tokens_total",] == 3 + len(site.ids("hello world")) + 1
    assert samples["freetoken_time_to_first_token_seconds_count",] == 2
    assert samples["freetoken_end_to_end_seconds_count",] == 2
    assert samples["freetoken_inter_token_seconds_count",] >= 2
    assert samples["freetoken_generations_total", ("outcome", "ok")] == 2
    assert samples["freetoken_http_responses_total", ("route", "/v1/completions"), ("status", "200")] == 1
    assert not any(name.endswith("_created") for (name, *_) in samples)


def test_actor_labels() -> None:
    assert [actor_label(name.value) for name in ActorName] == [
        "controller",
        "scheduler",
        "kv_allocator",
        "expert_cache",
        "weight_streamer",
        "cpu_executor",
        "gpu_executor",
        "api_front",
    ]


async def test_models(site: Site) -> None:
    _, listing = await site.get("/v1/models")
    status, model = await site.get("/v1/models/tiny")
    assert status == 200
    assert listing == {"object": "list", "data": [model], "first_id": "tiny", "last_id": "tiny", "has_more": False}
    assert (model["id"], model["object"]) == ("tiny", "model")
    assert (model["context_length"], model["max_output_tokens"]) == (512, 511)


def test_the_document_is_current() -> None:
    page = (ROOT / "docs" / "http.md").read_text()
    assert page == render(), "run: python -m freetoken.serving.document > docs/http.md"


async def test_the_interface_describes_itself(site: Site) -> None:
    status, document = await site.get("/openapi.json")
    assert (status, document["openapi"]) == (200, "3.1.0")
    for name in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert "requestBody" in document["paths"][name]["post"]
