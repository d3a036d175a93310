"""The whole engine on Ray: answers, errors, load, and what is left afterwards."""

from __future__ import annotations

import concurrent.futures
import random
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from freetoken.cli.process import EngineProcess
from freetoken.messages import ACTOR_NAMES
from tests.e2e.conftest import TINY_SETTINGS, TINY_SLOTS, complete, get, post

pytestmark = pytest.mark.e2e

PROMPTS = [[(7 * i + 3 * j) % 500 + 5 for j in range(length)] for i, length in enumerate((1, 15, 16, 17, 33, 100, 300))]


def test_chat_streams_the_same_text_as_a_whole_answer(engine: EngineProcess) -> None:
    client = openai.OpenAI(base_url=engine.url + "/v1", api_key="none")
    model = client.models.list().data[0].id
    request: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": 5,
    }
    whole = client.chat.completions.create(**request)
    pieces = []
    for chunk in client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        if chunk.choices:
            pieces.append(chunk.choices[0].delta.content or "")
        elif chunk.usage:
            assert chunk.usage.completion_tokens == whole.usage.completion_tokens
    assert "".join(pieces) == whole.choices[0].message.content
    client.close()


def test_all_three_ways_to_run_an_expert_occur(engine: EngineProcess) -> None:
    complete(engine.url, PROMPTS[-1], 32)
    experts = get(engine.url, "/v1/cache/status")["experts"]
    assert experts["hits_total"] > 0
    assert experts["fetches_total"] > 0
    assert experts["cpu_total"] > 0


def test_ray_serves_the_slow_figures(engine: EngineProcess) -> None:
    """As gauges of the node's metrics agent, the ones that configs/grafana.json draws among them."""
    kv_tokens = get(engine.url, "/v1/cache/status")["kv"]["capacity_tokens"]
    assert post(engine.url, "/v1/cache/rebalance", {"kv_tokens": kv_tokens})["outcome"] == "unchanged"
    raylet = next(p for p in psutil.Process(engine.pid).children(recursive=True) if p.name() == "raylet")
    session = next(a.partition("=")[2] for a in raylet.cmdline() if a.startswith("--session_dir="))
    port = next(Path(session).glob("metrics_export_port_*")).read_text().strip()
    drawn = set(re.findall(r"ray_freetoken_\w+", Path("configs/grafana.json").read_text()))
    assert len(drawn) > 12
    deadline, missing = time.monotonic() + 60.0, drawn
    while missing:
        assert time.monotonic() < deadline, missing
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            samples = re.findall(
                r"^(ray_freetoken_\w+)\{.*engine=\"freetoken\".*\} (\S+)$", response.read().decode(), re.M
            )
        missing = {name for name in drawn if not any(sample.startswith(name) for sample, _ in samples)}
        time.sleep(0.2)
    figures = {name.removeprefix("ray_freetoken_"): float(value) for name, value in samples}
    assert figures["controller_ready"] == figures["controller_last_decision_trigger_request"] == 1.0
    assert figures["kv_allocator_blocks"] * 16 == kv_tokens and figures["expert_cache_split_fetch_gbps"] > 0
    assert not any(name.endswith("_total") for name in figures)


def test_both_runtimes_give_the_same_tokens(engine: EngineProcess, tiny_checkpoint: Path, cache_dir: Path) -> None:
    arguments = (*TINY_SETTINGS, *TINY_SLOTS, "--runtime", "local", "--set", f"loader.cache_dir={cache_dir}")
    with EngineProcess(str(tiny_checkpoint), *arguments) as local:
        for prompt in PROMPTS:
            texts = [complete(url, prompt, 24)["choices"][0]["text"] for url in (engine.url, local.url)]
            assert texts[0] == texts[1]


def test_a_cached_prefix_changes_nothing(engine: EngineProcess) -> None:
    base = [(11 * j) % 490 + 7 for j in range(80)]
    for length in (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 79, 80):
        first = complete(engine.url, base[:length], 8)
        again = complete(engine.url, base[:length], 8)
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (length - 1) // 16 * 16


def test_the_next_turn_goes_on_from_what_was_generated(engine: EngineProcess) -> None:
    """A model with random weights writes tokens that no tokeniser would make of their text."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Tell me about the sea."}]
    model, known_tokens = get(engine.url, "/v1/models")["data"][0]["id"], 0
    for turn in range(4):
        answer = post(
            engine.url,
            "/v1/chat/completions",
            {
                "model": model,
                "messages": messages,
                "max_tokens": 40,
                "seed": turn,
            },
        )
        usage = answer["usage"]
        if turn:
            assert usage["prompt_tokens_details"]["cached_tokens"] == known_tokens // 16 * 16, messages
        known_tokens = usage["prompt_tokens"] + usage["completion_tokens"] - 1  # the last one has no KV yet
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]


def test_the_actors_give_their_own_account(engine: EngineProcess) -> None:
    actors = get(engine.url, "/v1/actors")["actors"]
    assert {a["name"] for a in actors} == {str(name) for name in ACTOR_NAMES}
    assert all(a["state"] == "serving" for a in actors)
    assert len({a["pid"] for a in actors}) == 8


@pytest.mark.parametrize(
    ("body", "status", "needle"),
    [
        ({"model": "nosuch", "prompt": "x"}, 404, "nosuch"),
        ({"prompt": "x", "temperature": -1}, 400, "-1"),
        ({"prompt": "x", "top_p": 0}, 400, "top_p"),
        ({"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
        ({"prompt": [5] * 2000}, 400, "2000"),
        ({"prompt": [5, 100000]}, 400, "100000"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
    ],
)
def test_bad_input_is_refused_by_name(engine: EngineProcess, body: dict[str, Any], status: int, needle: str) -> None:
    model = get(engine.url, "/v1/models")["data"][0]["id"]
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(engine.url, "/v1/completions", {"model": model} | body)
    text = caught.value.read().decode()
    caught.value.close()
    assert caught.value.code == status
    assert needle in text
    complete(engine.url, "still alive", 2)


def test_64_streams_with_random_aborts_return_to_the_baseline(engine: EngineProcess) -> None:
    rng = random.Random(3)
    client = openai.OpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0, timeout=120)
    model = client.models.list().data[0].id

    def one(index: int) -> int:
        prompt = [rng.randrange(5, 500) for _ in range(rng.randrange(1, 120))]
        leave_after = rng.choice([None, None, 1, 4])
        count = 0
        with client.completions.create(
            model=model, prompt=prompt, max_tokens=rng.randrange(4, 40), stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            for _ in stream:
                count += 1
                if leave_after is not None and count >= leave_after:
                    break
        return count

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        counts = list(pool.map(one, range(64)))
    client.close()
    assert all(count >= 1 for count in counts)
    deadline = time.monotonic() + 30
    while True:
        status = get(engine.url, "/v1/cache/status")
        scheduler = next(a for a in get(engine.url, "/v1/actors")["actors"] if a["name"] == "Scheduler")["metrics"]
        if scheduler["running"] == scheduler["waiting"] == 0 and status["kv"]["held_blocks"] == 0:
            break
        assert time.monotonic() < deadline, (scheduler, status["kv"])
        time.sleep(0.1)
    experts = status["experts"]
    assert experts["resident_slots"] + experts["in_flight_slots"] <= experts["slots"]


def test_metrics_are_prometheus_text_from_every_actor(engine: EngineProcess) -> None:
    import urllib.request

    with urllib.request.urlopen(engine.url + "/metrics", timeout=30) as response:
        text = response.read().decode()
    for actor in ("scheduler", "kv_allocator", "expert_cache", "cpu_executor", "gpu_executor", "weight_streamer"):
        assert f"freetoken_{actor}_" in text


def test_prompts_beside_a_stream_change_nothing(tiny_checkpoint: Path, cache_dir: Path) -> None:
    """Long prompts run in the background of decoding requests; with deterministic=true every token is the same."""
    flags = ("--runtime", "local", "--set", "deterministic=true", "--set", "kv.prefix_cache=false")
    arguments = (*TINY_SETTINGS, *TINY_SLOTS, *flags, "--set", f"loader.cache_dir={cache_dir}")
    longs = [[(13 * i + 5 * j) % 500 + 5 for j in range(290)] for i in range(3)]
    with EngineProcess(str(tiny_checkpoint), *arguments) as local, concurrent.futures.ThreadPoolExecutor(4) as pool:

        def background_steps() -> float:
            scheduler = next(a for a in get(local.url, "/v1/actors")["actors"] if a["name"] == "Scheduler")
            return float(scheduler["metrics"]["background_steps_total"])

        def text(prompt: list[int], count: int) -> str:
            return str(complete(local.url, prompt, count)["choices"][0]["text"])

        alone = [text(PROMPTS[1], 400), *(text(prompt, 8) for prompt in longs)]
        assert background_steps() == 0
        stream = pool.submit(text, PROMPTS[1], 400)
        while not stream.done():
            together = list(pool.map(lambda prompt: text(prompt, 8), longs))
            assert together == alone[1:]
        assert stream.result() == alone[0]
        assert background_steps() > 0
