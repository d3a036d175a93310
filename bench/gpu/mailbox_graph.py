"""What the mailbox costs a decode step: a captured graph that asks the real ExpertCache once per layer, and no more."""

from __future__ import annotations

from typing import Any


def time_round_trips(engine: Any, replays: int = 50) -> dict[str, float]:
    """Microseconds per layer of publishing (choice of experts inside) and waiting for the plan, one token.

    ``engine`` is a started ``CudaRig`` on a GPU that has decoded; with every record resident all answers are hits. No
    step may be under way.
    """
    import torch

    model = engine.runtime.model
    plane = model.plane
    batch = model.decode_batches[1]
    x, inputs = batch.buffers, batch.inputs
    layers = len(engine.launch.model.moe_layers)
    for server in (engine.cache_server, engine.cpu_server):
        server.notice()
    before = engine.cache_server.counters()

    def ask(brief: bool) -> None:
        for ordinal in range(layers):
            plane.publish(
                ordinal, inputs["step_id"], inputs["num_real"], x.hidden, x.ids, x.weights, inputs["admit"],
                x.router_logits,
            )  # fmt: skip
            plane.await_plan(ordinal, plane.layer_plan(x.plan, ordinal), one_token=brief)

    def timed(brief: bool) -> list[float]:
        ask(brief)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=model.stream, capture_error_mode="thread_local"):
            ask(brief)
        times = []
        for _ in range(replays):
            for server in (engine.cache_server, engine.cpu_server):
                server.notice()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / layers)
        return sorted(times)

    with model.on_stream():
        x.router_logits.normal_()
        times = timed(True)
        other = timed(False)
    after = engine.cache_server.counters()
    delta = {name: after[name] - before[name] for name in ("hits", "fetches", "cpu", "publishes", "plan_ns")}
    publishes = max(1, delta["publishes"])
    return {
        "us_per_layer_median": round(times[len(times) // 2], 3),
        "us_per_layer_best": round(times[0], 3),
        "us_per_layer_p90": round(times[int(0.9 * len(times))], 3),
        "us_per_layer_median_without_brief_plans": round(other[len(other) // 2], 3),
        "hit_rate": delta["hits"] / max(1, delta["hits"] + delta["fetches"] + delta["cpu"]),
        "plan_us": round(delta["plan_ns"] / publishes / 1e3, 3),
        "failed_waits": int((plane.counts[:, 6] != 0).sum()),
    }
