"""How long the service is away after `kill -9` of each actor, and whether any weight was read again.

For each actor: a request is running, the process is killed, and completions are tried until one succeeds.

    python bench/system/recovery.py [--model demo] [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_result
from bench.system.client import get, stream
from freetoken.cli.process import EngineProcess
from freetoken.messages import ACTOR_NAMES

LIMIT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    with EngineProcess(args.model, "--profile", "demo", "--set", "server.port=0") as engine:
        url = engine.url
        prompt = list(range(100, 140))
        stream(url, prompt, 8)
        for victim in ACTOR_NAMES:
            pid = next(a["pid"] for a in get(url, "/v1/actors")["actors"] if a["name"] == str(victim))
            outcome: dict[str, float] = {}
            started = threading.Event()

            def in_flight(outcome: dict[str, float] = outcome, started: threading.Event = started) -> None:
                started.set()
                with contextlib.suppress(OSError, ValueError):
                    stream(url, prompt, 2000)
                outcome["ended"] = time.perf_counter()

            thread = threading.Thread(target=in_flight)
            thread.start()
            started.wait()
            time.sleep(0.5)
            killed = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            back = None
            while time.perf_counter() - killed < LIMIT_S and back is None:
                # A victim that serves nobody directly may leave the service up for a moment: ask once it is noticed.
                with contextlib.suppress(OSError, ValueError, KeyError):
                    actors = {a["name"]: a for a in get(url, "/v1/actors")["actors"]}
                    if actors[str(victim)]["pid"] != pid and stream(url, prompt, 1, 30).error is None:
                        back = time.perf_counter() - killed
                        break
                time.sleep(0.05)
            thread.join(LIMIT_S)
            figures[str(victim)] = {
                "back_after_s": back,
                "in_flight_ended_after_s": outcome.get("ended", float("nan")) - killed,
                "streamer_adopted": actors["WeightStreamer"]["metrics"].get("adopted"),
            }
            print(victim, figures[str(victim)], flush=True)
    write_result(args.out, "recovery", figures)


if __name__ == "__main__":
    main()
