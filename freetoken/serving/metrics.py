"""The front's own measurements, and every actor's, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from freetoken.messages import ActorState, ActorStatus
from freetoken.serving.usage import Usage
from freetoken.telemetry.names import metric_name

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class FrontMetrics:
    """Counters and histograms of requests. Event loop only."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._responses = Counter(
            "freetoken_http_responses",
            "HTTP responses by route and status; 499 is a client that left.",
            ("route", "status"),
            registry=self.registry,
        )
        self._ended = Counter(
            "freetoken_generations",
            "Generations by outcome (ok, error, disconnected).",
            ("outcome",),
            registry=self.registry,
        )
        self._in_flight = Gauge("freetoken_generations_in_flight", "Generations under way.", registry=self.registry)
        self._prompt_tokens = Counter("freetoken_prompt_tokens", "Tokens of prompts submitted.", registry=self.registry)
        self._cached_tokens = Counter(
            "freetoken_prompt_cached_tokens", "Prompt tokens whose KV was reused.", registry=self.registry
        )
        self._output_tokens = Counter("freetoken_output_tokens", "Tokens generated.", registry=self.registry)
        self._first_token = Histogram(
            "freetoken_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._inter_token = Histogram(
            "freetoken_inter_token_seconds",
            "Between consecutive arrivals of tokens of a request.",
            buckets=_TOKEN_BUCKETS_S,
            registry=self.registry,
        )
        self._end_to_end = Histogram(
            "freetoken_end_to_end_seconds",
            "From a generation request's arrival to its end.",
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )

    def response(self, route: str, status: int) -> None:
        """A request was answered (or its client left: 499)."""
        self._responses.labels(route, str(status)).inc()

    def submitted(self, prompt_tokens: int) -> None:
        """A generation went to the Scheduler."""
        self._in_flight.inc()
        self._prompt_tokens.inc(prompt_tokens)

    def first_token(self, seconds: float) -> None:
        """The first token arrived this long after the request."""
        self._first_token.observe(seconds)

    def more_tokens(self, seconds: float) -> None:
        """Tokens arrived this long after the ones before."""
        self._inter_token.observe(seconds)

    def tokens(self, count: int) -> None:
        """This many tokens were taken from the Scheduler."""
        self._output_tokens.inc(count)

    def ended(self, usage: Usage, seconds: float, outcome: str) -> None:
        """A submitted generation is over."""
        self._in_flight.dec()
        self._ended.labels(outcome).inc()
        self._cached_tokens.inc(usage.cached_tokens)
        self._end_to_end.observe(seconds)


class _PageCollector(Collector):
    """The front's families (without the time each series was created), then samples of every actor's status."""

    def __init__(self, front: FrontMetrics, actors: Sequence[ActorStatus]) -> None:
        self._front = front
        self._actors = actors

    def collect(self) -> Iterator[Metric]:
        for family in self._front.registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
        yield from self._common()
        taken: set[str] = set()
        for actor in self._actors:
            for key, value in sorted(actor.metrics.items()):
                name = metric_name(actor.name.value, key)
                bare = name.removesuffix("_total")
                if bare in taken or not isinstance(value, (int, float)):
                    continue
                taken.add(bare)
                what = f"{key} of {actor.name.value}."
                if name != bare:
                    yield CounterMetricFamily(bare, what, value=value)
                else:
                    yield GaugeMetricFamily(bare, what, value=value)

    def _common(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("freetoken_actor_up", "1 while the actor serves.", labels=["actor", "state"])
        restarts = CounterMetricFamily("freetoken_actor_restarts", "Times the actor was restarted.", labels=["actor"])
        epoch = GaugeMetricFamily("freetoken_actor_epoch", "The epoch the actor is wired to.", labels=["actor"])
        uptime = GaugeMetricFamily("freetoken_actor_uptime_seconds", "Age of the actor's process.", labels=["actor"])
        for actor in self._actors:
            name = actor.name.value
            up.add_metric([name, actor.state.value], 1.0 if actor.state is ActorState.SERVING else 0.0)
            restarts.add_metric([name], actor.restarts)
            epoch.add_metric([name], actor.epoch)
            uptime.add_metric([name], actor.uptime_s)
        return (up, restarts, epoch, uptime)


def exposition(front: FrontMetrics, actors: Sequence[ActorStatus]) -> bytes:
    """The whole ``/metrics`` page."""
    registry = CollectorRegistry()
    registry.register(_PageCollector(front, actors))
    return generate_latest(registry)
