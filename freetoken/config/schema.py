"""The settings of an engine. Frozen after validation; an unknown key is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from freetoken.units import parse_bytes

Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0, le=1 << 62)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerConfig(_Section):
    """The HTTP front."""

    host: str = Field("127.0.0.1", description="Address to bind. Anything but loopback should come with API keys.")
    port: int = Field(8321, ge=0, le=65535, description="TCP port; 0 lets the system choose.")
    api_keys: tuple[str, ...] = Field((), description="Accepted bearer keys; empty means no authentication.")
    max_body_bytes: Bytes = Field(32 * 1024**2, description="Largest accepted request body.")
    keepalive_s: float = Field(5.0, gt=0, description="Longest silence on a stream before a keep-alive.")
    max_tokens_default: int | None = Field(
        None, ge=1, description="max_tokens of requests that name none; unset means up to the context length."
    )
    response_store_entries: int = Field(
        1000, ge=0, description="Responses kept for previous_response_id, the least recently used making way."
    )
    response_store_bytes: Bytes = Field(64 * 1024**2, description="Memory for kept responses, as JSON.")
    clamp_max_tokens: bool = Field(
        True,
        description="Lower a max_tokens beyond the context's end, as agents send; false refuses the request.",
    )
    model_aliases: tuple[str, ...] = Field(
        (), description="Further names of the served model; '*' answers to any name."
    )
    reasoning: Literal["default", "on", "off"] = Field(
        "default",
        description="Whether the model thinks when a request does not say so; default: as its template does.",
    )
    keep_reasoning: bool = Field(
        True, description="Keep the model's own reasoning in later turns; costs context, saves prefill."
    )
    canonical_tools: bool = Field(
        False, description="Sort tools and the keys of their schemas, for clients that shuffle them."
    )
    output_memory_tokens: int = Field(
        2_000_000,
        ge=0,
        description="Generated tokens remembered, to recognise them when clients send them back; some ten bytes "
        "each. An answer counts as 128 more than it has.",
    )
    max_requests_per_key: int | None = Field(
        None, ge=1, description="Generations under way for one API key before it gets 429; unset means no limit."
    )
    request_timeout_s: float | None = Field(
        None, gt=0, description="Longest time for one generation, queueing included; unset means no limit."
    )
    allowed_origins: tuple[str, ...] = Field(
        (), description="Origins of web pages that may use the API (CORS), like 'http://localhost:3000'."
    )


class SchedulerConfig(_Section):
    """Batching."""

    max_num_running: int = Field(64, ge=1, le=4096, description="Requests computed at the same time.")
    max_num_waiting: int = Field(256, ge=0, description="Requests queued before new ones get 429.")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=16,
        le=65536,
        description="Tokens of one step, prefill and decode. Unset: 512, and on a GPU up to 4096 as far as the budget "
        "has room for them.",
    )
    prefill_chunk_tokens: int = Field(
        256,
        ge=16,
        description="Shortest piece into which a prompt is cut while other requests are decoding. How much longer "
        "the pieces are, up to max_num_batched_tokens, follows from what they are measured to cost.",
    )
    decode_share: float = Field(
        0.4,
        ge=0.05,
        le=0.95,
        description="Share of the device's time that decoding requests keep while a prompt is computed beside them.",
    )
    step_timeout_s: float = Field(120.0, gt=0, description="A step that takes longer is abandoned.")
    max_repeated_tokens: int | None = Field(
        4096,
        ge=2,
        description="A model that generates one token so many times in a row is taken for broken: the request fails, "
        "and no later one reuses what it cached. Requests with ignore_eos, or short of their min_tokens, may go on; "
        "unset means no limit.",
    )


class KVConfig(_Section):
    """Key/value cache."""

    block_size: int = Field(16, ge=1, le=256, description="Tokens in a block.")
    num_tokens: int | None = Field(
        None, ge=1, le=1 << 40, description="Capacity in tokens; unset lets the boot plan choose."
    )
    dtype: Literal["auto", "f32", "bf16"] = Field("auto", description="auto follows the model's dtype.")
    prefix_cache: bool = Field(True, description="Reuse the KV of common prefixes.")


class ExpertsConfig(_Section):
    """Where experts run."""

    split: str = Field(
        "auto",
        description="Misses fetched by the device: 'auto' (by live rates), 'fetch' (all), 'cpu' (none) or "
        "'q=FRACTION'.",
    )
    split_records: bool = Field(
        True,
        description="Let one missing expert of a decode layer be split by its tiles, the device fetching a part while "
        "the CPU runs the rest, so that both finish together.",
    )
    lookahead: bool = Field(
        True,
        description="While one sequence decodes on a GPU, copy ahead of time an expert that the next layer will "
        "probably miss, where that pays. Changes no result.",
    )
    measure: bool = Field(
        True, description="Before the first launch of a model, measure what fetches and CPU experts cost (split=auto)."
    )
    policy: Literal["crf", "lru"] = Field("crf", description="Admission and eviction of expert slots.")
    half_life_tokens: float = Field(8.0, gt=0, description="Half-life of the recent average of uses (crf).")
    long_half_life_tokens: float = Field(
        512.0, gt=0, description="Half-life of the lasting average of uses (crf); not below the other."
    )
    admission_margin: float = Field(
        1.5, ge=1, description="How many times an evicted expert's score that of its successor must be (crf)."
    )
    admission_floor: float = Field(
        1.2,
        ge=0,
        description="Uses just now that an expert's score must be worth before it evicts another (crf); 0: any. Two "
        "uses within some 20 tokens are worth 1.2.",
    )
    trace_path: str | None = Field(
        None, description="Record a route trace of up to 256 MiB into this new file from the start on."
    )
    trace_dir: str | None = Field(
        None, description="Where route traces recorded on request are kept (unset: traces in loader.cache_dir)."
    )
    trace_dir_bytes: Bytes = Field(1024**3, description="Space of all traces in trace_dir; recording ends at it.")
    seed_tail_tokens: int = Field(
        32, ge=0, description="Last tokens of a prefill chunk whose experts may be admitted to slots."
    )

    @field_validator("trace_path", "trace_dir")
    @classmethod
    def _make_absolute(cls, value: str | None) -> str | None:
        """Actors have working directories of their own."""
        return value if value is None else str(Path(value).expanduser().absolute())

    @field_validator("split")
    @classmethod
    def _check_split(cls, value: str) -> str:
        if value in ("auto", "fetch", "cpu"):
            return value
        match = re.fullmatch(r"q=([0-9]+(?:\.[0-9]*)?|\.[0-9]+)", value)
        if match is None or not 0.0 <= float(match.group(1)) <= 1.0:
            raise ValueError(
                f"split {value!r} is not 'auto', 'fetch', 'cpu' or 'q=FRACTION' with a fraction from 0 to 1"
            )
        return value

    @property
    def fetch_fraction(self) -> float | None:
        """Share of a layer's misses that the device fetches (the rest runs on CpuExecutor); None: by live rates."""
        named = {"auto": None, "fetch": 1.0, "cpu": 0.0}
        return named[self.split] if "=" not in self.split else float(self.split[2:])


class ExecutorConfig(_Section):
    """Native threads. Unset thread counts are planned from the physical cores."""

    cpu_threads: int | None = Field(None, ge=1, description="Workers of CpuExecutor.")
    device_threads: int | None = Field(None, ge=1, description="Workers of GpuExecutor on the CPU device.")
    pin: bool = Field(True, description="Pin workers to physical cores.")
    isa: Literal["auto", "scalar", "avx2", "avx512", "avx512_bf16"] = Field(
        "auto", description="Newest instruction set the CPU kernels may use."
    )
    spin_us: int | None = Field(
        None, ge=0, description="Busy wait before parking; unset: 0 with fewer cores than parties, else 50."
    )
    wait_timeout_s: float = Field(20.0, gt=0, description="Longest wait for one layer's answer.")


class ElasticConfig(_Section):
    """Memory that moves between expert slots and KV while serving; where the device has a budget."""

    enabled: bool = Field(True, description="Build the arena so that its pools can trade memory.")
    mode: Literal["auto", "virtual", "reallocate"] = Field(
        "auto",
        description="How: virtual maps memory at its new place while requests run; reallocate allocates all anew, for "
        "which running requests are computed again; auto is virtual where the device can.",
    )
    auto: bool = Field(True, description="Trade memory without being asked, where it is worth more.")
    granule_bytes: Bytes | None = Field(
        None, description="What is moved at once; unset: 32 MiB, less for small budgets."
    )
    interval_s: float = Field(5.0, gt=0, description="Interval of automatic decisions.")
    cooldown_s: float = Field(
        15.0, ge=0, description="After a change, memory is taken back from KV no sooner than this."
    )
    reallocate_cooldown_s: float = Field(
        600.0, ge=0, description="With reallocation, nothing changes by itself sooner than this after a change."
    )
    advantage: float = Field(
        1.5, ge=1, description="How many times more a granule must be worth on the side that gets it."
    )


class LoaderConfig(_Section):
    """Reading checkpoints."""

    threads: int = Field(4, ge=1, le=64, description="Reader threads.")
    chunk_bytes: Bytes = Field(8 * 1024**2, description="Bytes of one read.")
    direct: bool = Field(True, description="O_DIRECT, falling back to buffered reads where refused.")
    verify: bool = Field(True, description="Check every record's checksum while loading.")
    cache_dir: str | None = Field(None, description="Where converted checkpoints are kept (~/.cache/freetoken).")


class RayConfig(_Section):
    """The cluster."""

    address: str | None = Field(None, description="Cluster to attach to; unset: a running one, else a local one.")
    namespace: str = Field("freetoken", description="Ray namespace of the actors.")
    dashboard: bool = Field(True, description="Start the dashboard with a local head.")
    object_store_bytes: Bytes = Field(200 * 1024**2, description="Object store of a local head.")
    transport: Literal["socket", "ray"] = Field("socket", description="Carrier of per-step messages.")


class HealthConfig(_Section):
    """Supervision."""

    ping_interval_s: float = Field(2.0, gt=0, description="Interval of liveness pings.")
    ping_timeout_s: float = Field(10.0, gt=0, description="A silent actor is killed and restarted after this.")
    load_timeout_s: float = Field(3600.0, gt=0, description="Longest load of one actor.")
    max_restarts: int = Field(16, ge=0, description="Restarts of one actor within ten minutes before giving up.")


class EngineConfig(_Section):
    """Everything ``freetoken launch`` can be told."""

    model: str = Field(description="FTW directory, Hugging Face checkpoint directory, GGUF file or hub name.")
    served_model_name: str | None = Field(None, description="Name in the API; unset: that of the directory or file.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where dense layers and cached experts run.")
    runtime: Literal["ray", "local"] = Field("ray", description="Actors on Ray, or all in one process.")
    vram: Bytes | None = Field(
        None,
        description="Device memory budget. Unset: on a GPU what is free on the card, less 512 MiB; on the CPU device "
        "experts are read in place.",
    )
    max_context_tokens: int | None = Field(
        None, ge=2, le=1 << 40, description="Context length limit; defaults to the model's."
    )
    deterministic: bool = Field(
        False,
        description="Bitwise equal outputs whatever batch, chunking, cache state and split (CPU device).",
    )
    seed: int = Field(0, description="Base of the seeds of requests that bring none.")
    server: ServerConfig = ServerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    kv: KVConfig = KVConfig()
    experts: ExpertsConfig = ExpertsConfig()
    executor: ExecutorConfig = ExecutorConfig()
    elastic: ElasticConfig = ElasticConfig()
    loader: LoaderConfig = LoaderConfig()
    ray: RayConfig = RayConfig()
    health: HealthConfig = HealthConfig()

    @property
    def trace_dir(self) -> Path:
        """The directory of traces recorded on request."""
        if self.experts.trace_dir is not None:
            return Path(self.experts.trace_dir)
        root = self.loader.cache_dir
        return (Path(root).expanduser() if root else Path.home() / ".cache" / "freetoken") / "traces"
