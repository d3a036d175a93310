"""Does a small cache change what the model says? Decode steps at low residency against the fully resident engine.

    python bench/gpu/soak.py --model FTW_DIRECTORY [--device cuda] [--steps 10000] [--residency 0.05] [--seconds 600]

Both engines are given the same random tokens one by one, so their routing is random and the same, and a difference in
one step does not make the next ones incomparable. Every step's best token is compared, and every ``--every`` steps the
logits (on a GPU): the greatest difference and the KL divergence. Misses take every way in turn, a period each: all
fetched, half and half, all on the CPU. Stops at ``--steps`` or when ``--seconds`` are over. Exit status 1 when the KL
divergence exceeds ``--max-kl`` or best tokens differ in more than ``--max-flips`` of the steps (a near tie may turn).
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
    parser.add_argument("--max-kl", type=float, default=1e-3)
    parser.add_argument("--max-flips", type=float, default=0.02)
    arguments = parser.parse_args()
    rig.end_on_sigterm()
    begun = time.monotonic()
    checkpoint = rig.provide_model(arguments)
    arguments.kv_tokens = max(arguments.kv_tokens, arguments.steps + arguments.prompt_tokens + 512)
    settings = rig.settings_of(arguments, scheduler={"max_num_running": 1, "max_num_batched_tokens": 512})
    store = rig.LoadedStore(checkpoint)
    index = store.index
    tokens = rig.prompts(index, 1, arguments.prompt_tokens + arguments.steps, arguments.seed)[0]

    def run(residency: float, steps: int) -> tuple[list[int | None], list[Any], list[ExpertCounters]]:
        """(best tokens, logits after every period, counters of every period) of up to ``steps`` steps in the time there
        is."""
        logits: list[Any] = []
        opened = time.monotonic()
        with rig.open_rig(store, settings, residency, 1.0) as engine:
            driver = rig.Driver(engine)
            if residency >= 1.0:
                driver.fill(rig.prompts(index, 32, arguments.fill_tokens, arguments.seed + 1))
            driver.start_known("a", tokens, arguments.prompt_tokens)
            now = time.monotonic()
            left = begun + arguments.seconds - now
            if residency >= 1.0:  # the other engine takes as long to open, and longer for its steps
                left = (left - (now - opened)) / (1 + SLOWER)
            best: list[int | None] = []
            periods: list[ExpertCounters] = []
            while len(best) < steps and time.monotonic() < now + left:
                if residency < 1.0:
                    engine.cache_server.set_fetch_fraction(SPLITS[len(periods) % len(SPLITS)])
                span = driver.decode(min(arguments.every, steps - len(best)), known=True)
                best += span.tokens["a"]
                periods.append(span.experts)
                if hasattr(engine, "runtime"):
                    logits.append(engine.runtime.model.logits[0].float().cpu().clone())
        return best, logits, periods

    whole, reference, _ = run(1.0, arguments.steps)
    print(f"resident: {len(whole)} steps after {time.monotonic() - begun:.1f} s", flush=True)
    few, logits, periods = run(arguments.residency[0], len(whole))
    common = min(len(whole), len(few))
    flips = sum(whole[i] != few[i] for i in range(common))
    experts = sum(periods, ExpertCounters())
    uses = max(1, experts.hits + experts.fetches + experts.cpu)
    checks = [
        {"split": SPLITS[i % len(SPLITS)], **_compare(a, b)}
        for i, (a, b) in enumerate(zip(reference, logits, strict=False))
    ]
    figures: dict[str, Any] = {
        "device": arguments.device,
        "residency": arguments.residency[0],
        "steps_compared": common,
        "best_tokens_differ": flips,
        "hits": experts.hits / uses,
        "fetched": experts.fetches / uses,
        "cpu": experts.cpu / uses,
        "every": arguments.every,
        "checks": checks,
        "distinct_tokens": len(set(few)),
        "seconds": round(time.monotonic() - begun, 1),
    }
    for split in SPLITS:
        of_split = [check for check in checks if check["split"] == split]
        if of_split:
            figures[f"max_kl_split_{split}"] = max(check["kl"] for check in of_split)
            figures[f"max_error_split_{split}"] = max(check["max_error"] for check in of_split)
    write_result(arguments.out, "soak", figures)
    good = common > 0 and flips <= arguments.max_flips * common
    return 0 if good and all(check["kl"] <= arguments.max_kl for check in checks) else 1


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
