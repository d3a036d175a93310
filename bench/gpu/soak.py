"""Does a small cache change what the model says? Decode steps at low residency against the fully resident engine.

    python bench/gpu/soak.py --model FTW_DIRECTORY [--device cuda] [--steps 10000] [--residency 0.05] [--seconds 600]

Both engines decode the same prompt greedily; every ``--every`` steps tokens and logits (on a GPU) are compared: the
greatest difference, the KL divergence, whether the best token is the same. Misses take every way in turn: all fetched,
half and half, all on the CPU. Stops at ``--steps`` or when ``--seconds`` are over. Exit status 1 when tokens differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_result
from bench.system import rig
from freetoken.messages import ExpertCounters

SPLITS = (0.5, 1.0, 0.0)
SLOWER = 3.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rig.add_engine_arguments(parser)
    parser.set_defaults(residency=(0.05,), device="cuda")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything")
    arguments = parser.parse_args()
    rig.end_on_sigterm()
    begun = time.monotonic()
    checkpoint = rig.provide_model(arguments)
    arguments.kv_tokens = max(arguments.kv_tokens, arguments.steps + arguments.prompt_tokens + 512)
    settings = rig.settings_of(arguments, scheduler={"max_num_running": 1, "max_num_batched_tokens": 512})
    store = rig.LoadedStore(checkpoint)
    index = store.index
    prompt = rig.prompts(index, 1, arguments.prompt_tokens, arguments.seed)[0]

    def run(residency: float, steps: int) -> tuple[list[int | None], list[Any], ExpertCounters]:
        """(tokens, logits after every period, counters) of up to ``steps`` steps in the time there is."""
        logits: list[Any] = []
        opened = time.monotonic()
        with rig.open_rig(store, settings, residency, 1.0) as engine:
            driver = rig.Driver(engine)
            if residency >= 1.0:
                driver.fill(rig.prompts(index, 32, arguments.fill_tokens, arguments.seed + 1))
            tokens = [*driver.start("a", prompt, arguments.steps + 1).tokens["a"]]
            now = time.monotonic()
            left = begun + arguments.seconds - now
            if residency >= 1.0:  # the other engine takes as long to open, and longer for its steps
                left = (left - (now - opened)) / (1 + SLOWER)
            experts = ExpertCounters()
            number = 0
            while len(tokens) <= steps and time.monotonic() < now + left:
                if residency < 1.0:
                    engine.cache_server.set_fetch_fraction(SPLITS[number % len(SPLITS)])
                number += 1
                span = driver.decode(min(arguments.every, steps + 1 - len(tokens)))
                tokens += span.tokens["a"]
                experts = experts + span.experts
                if hasattr(engine, "runtime"):
                    logits.append(engine.runtime.model.logits[0].float().cpu().clone())
        return tokens, logits, experts

    whole, reference, _ = run(1.0, arguments.steps)
    print(f"resident: {len(whole) - 1} steps after {time.monotonic() - begun:.1f} s", flush=True)
    few, logits, experts = run(arguments.residency[0], len(whole) - 1)
    common = min(len(whole), len(few))
    differing = next((i for i in range(common) if whole[i] != few[i]), None)
    uses = max(1, experts.hits + experts.fetches + experts.cpu)
    checks = [_compare(a, b) for a, b in zip(reference, logits, strict=False)]
    figures: dict[str, Any] = {
        "device": arguments.device,
        "residency": arguments.residency[0],
        "steps_compared": common - 1,
        "first_differing_token": differing,
        "hits": experts.hits / uses,
        "fetched": experts.fetches / uses,
        "cpu": experts.cpu / uses,
        "every": arguments.every,
        "checks": checks,
        "distinct_tokens": len(set(few)),
        "seconds": round(time.monotonic() - begun, 1),
    }
    if checks:
        figures["max_error"] = max(check["max_error"] for check in checks)
        figures["max_kl"] = max(check["kl"] for check in checks)
        figures["best_token_agrees"] = all(check["best_token_agrees"] for check in checks)
    write_result(arguments.out, "soak", figures)
    return 0 if differing is None and common > 1 else 1


def _compare(reference: Any, found: Any) -> dict[str, Any]:
    import torch

    expected, got = torch.log_softmax(reference.double(), 0), torch.log_softmax(found.double(), 0)
    return {
        "max_error": float((reference - found).abs().max()),
        "std": float(reference.std()),
        "kl": float((expected.exp() * (expected - got)).sum()),
        "best_token_agrees": bool(reference.argmax() == found.argmax()),
    }


if __name__ == "__main__":
    sys.exit(main())
