"""Typed surface of the C++ extension (csrc/). Every call that can take longer than a few microseconds drops the GIL.

Arrays are C-contiguous numpy arrays of the stated dtype; BF16 travels as ``uint16``. Wrong dtype, rank, shape or
contiguity raises ``ValueError`` naming the argument. ``float32`` is written f32 below.
"""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Weights = NDArray[Any]  # float32, or uint16 holding BF16

# ---------------------------------------------------------------------------------------------- shared memory

@final
class SharedSegment:
    """A memfd mapped read-write and shared, or a range of addresses to map parts of others into. Unmapped when the last
    user (Python or native) lets go of it."""

    @staticmethod
    def create(name: str, size_bytes: int) -> SharedSegment: ...
    @staticmethod
    def attach(fd: int, size_bytes: int, name: str = "") -> SharedSegment:
        """Maps a duplicate of ``fd``; the caller keeps its own. ``OSError`` when the file is smaller."""

    @staticmethod
    def reserve(name: str, size_bytes: int) -> SharedSegment:
        """Addresses without memory; what is not mapped must not be touched, also not through the buffer."""

    def map(self, offset: int, size_bytes: int, source: SharedSegment, source_offset: int) -> None:
        """Put pages of ``source`` (which may be mapped elsewhere too) there, in a reserved range. Whole pages.
        ``OSError`` or ``MemoryError`` leaves what was there before."""

    def unmap(self, offset: int, size_bytes: int) -> None:
        """Nothing is there any more; the pages stay with their segment."""

    @property
    def fd(self) -> int:
        """-1 for a reserved range."""

    @property
    def name(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    def populate(self) -> None:
        """Allocate every page now (posix_fallocate + MADV_POPULATE_WRITE). ``MemoryError`` when memory is short."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

# ---------------------------------------------------------------------------------------------- machine

def cpu_features() -> dict[str, bool]:
    """avx2, f16c, fma, avx512f, avx512bw, avx512vl, avx512_bf16, avx512_vnni, amx_bf16, amx_int8."""

def physical_cores() -> list[int]:
    """One logical CPU id per physical core in this process's affinity mask, in order."""

def crc32c(data: Any, crc: int = 0) -> int:
    """CRC-32C (Castagnoli) of a contiguous buffer, continuing from ``crc``; hardware instruction where present."""

@final
class WorkerPool:
    """Fixed threads that run native parallel sections; one section at a time. Idle workers spin ``spin_us``, then
    park."""

    def __init__(self, num_threads: int, core_ids: Sequence[int] = (), spin_us: int = 0, isa: str = "auto") -> None:
        """``core_ids`` empty: not pinned. ``isa`` caps the kernels: auto, scalar, avx2, avx512, avx512_bf16."""

    @property
    def num_threads(self) -> int: ...
    @property
    def isa(self) -> str:
        """The instruction set in use."""

    def close(self) -> None: ...

def stream_read_gbps(pool: WorkerPool, segment: SharedSegment, repetitions: int = 3) -> float:
    """Best rate (10^9 bytes/s) at which the pool's threads read the whole segment; what kernels are measured
    against."""

# ---------------------------------------------------------------------------------------------- reading

@final
class DirectReader:
    """Multi-threaded chunked reads of files into memory, with O_DIRECT where the file system allows it."""

    def __init__(self, num_threads: int, chunk_bytes: int, direct: bool = True) -> None: ...
    def submit(self, path: str, size_bytes: int, destination: SharedSegment, destination_offset: int = 0) -> None:
        """Read the whole file (exactly ``size_bytes``; ``OSError`` with the path at ``wait`` when it is shorter)."""

    def progress(self) -> int:
        """Bytes read so far over all submissions."""

    def wait(self) -> None:
        """Block until every submission is complete; raises the first failure as ``OSError`` naming the file."""

    @property
    def used_direct(self) -> bool: ...
    def cancel(self) -> None: ...

def crc32c_ranges(segment: SharedSegment, offsets: I64, sizes: I64, num_threads: int) -> NDArray[np.uint32]:
    """CRC-32C of each range of the segment, computed in parallel."""

# ---------------------------------------------------------------------------------------------- dense kernels
# Row-wise and batch-invariant: the bits of a row do not depend on how many other rows there are or on num_threads.

def linear(pool: WorkerPool, x: F32, weight: Weights, bias: F32 | None, out: F32) -> None:
    """out[T,O] = x[T,I] @ weight[O,I].T (+ bias[O]); f32 accumulation in a fixed order per output element."""

def linear_q4_0(
    pool: WorkerPool,
    x: F32,
    nibbles: NDArray[np.uint8],
    scales: NDArray[np.float16],
    bias: F32 | None,
    out: F32,
) -> None:
    """out[T,O] = x[T,I] @ W.T (+ bias[O]), W as planes: nibbles [O, I/2], scales [O, I/32] (see quant.q4_0_record.py).

    x is quantised to 8 bits in blocks of 32 (scale max|x| / 127); products of blocks are exact, their sum is float32.
    """

def rms_norm(pool: WorkerPool, x: F32, weight: F32, eps: float, out: F32) -> None:
    """out[T,H] = x / sqrt(mean(x^2) + eps) * weight; in place allowed."""

def add_rms_norm(pool: WorkerPool, residual: F32, delta: F32, weight: F32, eps: float, out: F32) -> None:
    """residual[T,H] += delta, then out = rms_norm(residual)."""

def rotary(pool: WorkerPool, x: F32, positions: I32, cos: F32, sin: F32) -> None:
    """Rotate x[T, heads, D] in place, half-split pairs: cos/sin are [max_position, R/2] tables, R = rotated leading
    dims."""

def silu_and_mul(pool: WorkerPool, gate: F32, up: F32, out: F32) -> None:
    """out = gate * sigmoid(gate) * up, elementwise over [T, I]."""

def router_topk(
    pool: WorkerPool, logits: F32, top_k: int, renormalize: bool, scaling: float, ids: I32, weights: F32
) -> None:
    """softmax over logits[T,E], the top_k per row in descending order (ties: lower id first) -> ids, weights [T,K]."""

def kv_store(
    pool: WorkerPool,
    keys: F32,
    values: F32,
    slot_mapping: I64,
    kv: SharedSegment,
    layer_offset_bytes: int,
    block_stride_bytes: int,
    block_size: int,
    kv_dtype: str,
) -> None:
    """Write keys/values [T, KVH, D] of one layer at token slots (block * block_size + offset) of block-major KV
    records.

    Within a block record, a layer occupies [2 (k, v), block_size, KVH, D] of kv_dtype ("f32" or "bf16") from
    ``layer_offset_bytes``. A slot of -1 is skipped.
    """

def paged_attention(
    pool: WorkerPool,
    queries: F32,
    row_starts: I32,
    positions: I32,
    block_tables: I32,
    kv: SharedSegment,
    layer_offset_bytes: int,
    block_stride_bytes: int,
    block_size: int,
    num_kv_heads: int,
    kv_dtype: str,
    scale: float,
    sliding_window: int,
    out: F32,
) -> None:
    """Causal attention of a ragged batch over paged KV (which already holds the new tokens).

    queries [T, QH, D]; row r owns query tokens row_starts[r]:row_starts[r+1] (row_starts has R+1 entries);
    positions [T]: query t attends to keys 0..positions[t] (the last ``sliding_window`` of them when > 0);
    block_tables [R, max_blocks] (padded with -1). out [T, QH*D]. GQA by integer ratio.
    """

# ---------------------------------------------------------------------------------------------- experts

@final
class NativeLayout:
    """A record layout as the kernels see it (see freetoken.quant.record.py)."""

    def __init__(
        self,
        dtype: str,
        hidden: int,
        intermediate: int,
        tile_columns: int,
        num_tiles: int,
        tile_stride_bytes: int,
        stride_bytes: int,
        gate_offset: int,
        up_offset: int,
        down_offset: int,
        gate_scales_offset: int = -1,
        up_scales_offset: int = -1,
        down_scales_offset: int = -1,
    ) -> None:
        """``dtype`` is ``"f32"``, ``"bf16"`` or ``"q4_0"``. Offsets count from the start of a tile; those of ``q4_0``
        are of the nibbles, and only it has scales."""

@final
class ExpertStore:
    """Where every record lies: maps (expert layer ordinal, expert) to an address in one of the segments."""

    def __init__(
        self,
        segments: Sequence[SharedSegment],
        layouts: Sequence[NativeLayout],
        layer_layout: Sequence[int],
        record_segment: I32,
        record_offset: I64,
    ) -> None:
        """``record_segment`` and ``record_offset`` are [L, E]. ``ValueError`` when a record leaves its segment."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_experts(self) -> int: ...

def expert_ffn(
    pool: WorkerPool,
    store: ExpertStore,
    layer: int,
    hidden: F32,
    ids: I32,
    weights: F32,
    out: F32,
    deterministic: bool = False,
) -> None:
    """out[T,H] = sum over k of weights[t,k] * FFN(ids[t,k])(hidden[t]), straight from the store. Ids of -1 are
    skipped."""

def time_experts(
    pool: WorkerPool,
    store: ExpertStore,
    layer: int,
    num_experts: int,
    num_tokens: int,
    window_s: float,
    slots: SharedSegment | None = None,
) -> I64:
    """Nanoseconds of each of as many layers as fit ``window_s`` (two at least) that run ``num_experts`` records for
    all of ``num_tokens`` tokens each, as CpuExecutor does. With ``slots`` every record is copied there first, as the
    CPU device fetches it."""

@final
class Mailbox:
    """The per-layer hand-off between GpuExecutor, ExpertCache and CpuExecutor, in one shared segment."""

    @staticmethod
    def required_bytes(
        max_tokens: int,
        top_k: int,
        hidden: int,
        num_layers: int,
        num_experts: int,
        max_shared_tokens: int = 0,
        route_rows: bool = True,
    ) -> int: ...
    @staticmethod
    def create(
        segment: SharedSegment,
        epoch: int,
        max_tokens: int,
        top_k: int,
        hidden: int,
        num_layers: int,
        num_experts: int,
        max_shared_tokens: int = 0,
        route_rows: bool = True,
    ) -> Mailbox:
        """``max_shared_tokens``: tokens of a publish in which CpuExecutor may take part (rows of hidden and partial);
        0: max_tokens. Longer publishes must be for the device alone. ``route_rows``: partial has room for a row per
        route, which deterministic publishes need."""

    @staticmethod
    def attach(segment: SharedSegment) -> Mailbox:
        """``ValueError`` when the segment holds no mailbox of this version."""

    @property
    def epoch(self) -> int: ...
    @property
    def segment(self) -> SharedSegment: ...
    def layout(self) -> dict[str, int]:
        """All that a client needs to address the segment by itself; csrc/core/mailbox.h has the protocol.

        ``X_offset``: from the start of the segment, of the words' values (req, plan, part, abort: u32) and of the
        regions (request, hidden, ids, weights, admit, plan_header, entries, routes, brief, slot_of, stamps,
        partial).
        ``X_field``: within a struct, of request_(seq, layer: u32; step_id: u64; num_tokens, top_k, flags: u32),
        plan_(seq, num_hits, num_fetches, num_cpu, num_routes, num_admitted, num_evicted, num_split,
        split_tiles: u32), entry_(expert, kind, source_slot, destination_slot, first_route, num_routes, first_tile,
        num_tiles: i32) and stamps_client (i64 published, planned, own,
        part, seq, one after the other). ``request_bytes, plan_header_bytes, entry_bytes, stamps_bytes``: sizes.
        ``flag_deterministic, flag_device_only, flag_device_client, flag_splittable, flag_staged``, ``kind_hit,
        kind_fetch, kind_cpu``, ``abort_NAME``: values. ``max_tokens, top_k, hidden, num_layers, num_experts,
        max_shared_tokens, route_rows (0, 1), max_entries``: geometry. ``version, total_bytes``.
        """

    def stamps(self) -> NDArray[np.int64]:
        """[L, 8] nanoseconds of each layer's latest publish: seen and planned (ExpertCache), taken and done
        (CpuExecutor), published, plan seen, own share done, CPU share seen (client, on a clock of its own)."""

    def abort(self, reason: str = "requested") -> None:
        """All present and future waits on this mailbox fall through; it is dead afterwards. The first reason stays: an
        ``abort_NAME`` of ``layout`` (``plan_late``, ``partial_late``, ``client_failed``, ...)."""

    @property
    def aborted(self) -> bool: ...
    @property
    def abort_reason(self) -> str:
        """Why, for messages; empty when it is not aborted."""

    @property
    def overdue(self) -> str:
        """``ExpertCache`` or ``CpuExecutor``, if its answer to the latest publish has not come; else empty."""

@final
class Vacated:
    """What ``vacate`` did."""

    @property
    def moves(self) -> list[tuple[int, int]]:
        """(from, to): records to be copied before ``finish_vacate``; no slot is named twice."""

    @property
    def num_evicted(self) -> int:
        """Records that were given up."""

@final
class SlotTable:
    """Which record lies in which slot, and which one goes next. Not thread-safe; owned by one CacheServer."""

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        num_slots: int,
        policy: str = "crf",
        half_life_tokens: float = 8.0,
        long_half_life_tokens: float = 512.0,
        margin: float = 1.5,
        floor: float = 1.2,
    ) -> None: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def num_resident(self) -> int: ...
    def lookup(self, layer: int, expert: int) -> int:
        """The slot, or -1."""

    def access(
        self,
        layer: int,
        experts: Sequence[int],
        token_counts: Sequence[int],
        admit: Sequence[bool],
        num_tokens: int,
        is_run: bool = False,
    ) -> list[tuple[int, int]]:
        """One publish, as the server does it (for tests): per distinct expert (slot or -1, admitted slot or -1).

        ``is_run``: its tokens follow each other in one sequence; else each is of its own."""

    def resident(self) -> list[tuple[int, int, int]]:
        """(slot, layer, expert) of every resident record."""

    def vacate(self, num_slots: int) -> Vacated:
        """Begin to have fewer slots: the worst records go, nothing is admitted beyond ``num_slots`` any more, and the
        records there stay readable until ``finish_vacate``, which may follow after any number of publishes.
        ``RuntimeError`` while slots are being vacated."""

    def finish_vacate(self) -> None:
        """The records that move were copied, after every fill and read of earlier publishes. Does nothing without a
        ``vacate``."""

    def cancel_vacate(self) -> None:
        """All slots stay. Does nothing without a ``vacate``."""

    def grow(self, num_slots: int) -> None:
        """Have more slots. ``RuntimeError`` while slots are being vacated."""

    def score_curve(self, capacities: Sequence[int]) -> list[float]:
        """Estimated hit rate at each capacity (ascending): the best records' share of the sum of scores. Zeros with
        LRU."""

    def empty(self, num_slots: int) -> None:
        """``num_slots`` slots, all free; ends a ``vacate``. Scores of records stay."""

    def check_integrity(self) -> None:
        """``AssertionError`` when free + resident + in flight != capacity or the two directions disagree."""

def replay_publishes(
    slots: SlotTable,
    top_k: int,
    fetch_fraction: float,
    layers: NDArray[np.int32],
    token_counts: NDArray[np.int32],
    ids: NDArray[np.int32],
    admit: NDArray[np.uint8],
) -> NDArray[np.int64]:
    """Plan N publishes as a server would, one after the other: ``layers`` and ``token_counts`` [N]; ``ids``
    [sum of token_counts, K] (-1: none) and ``admit`` [sum] of their tokens. Returns [N, 5]: hits, fetches, cpu,
    admitted, evicted. ``slots`` ends up as the last publish leaves it."""

@final
class PublishReplay:
    """The planner and table of a server without a mailbox: one publish after the other."""

    def __init__(self, slots: SlotTable, top_k: int, max_tokens: int = 1) -> None: ...
    def plan(
        self,
        layer: int,
        ids: NDArray[np.int32],
        admit: NDArray[np.uint8],
        record_bytes: float,
        fetch_fraction: float = 1.0,
        split: SplitPlanner | None = None,
        num_tiles: int = 1,
    ) -> LayerShares:
        """Of ``ids`` [T, K] (-1: none) and ``admit`` [T]: the misses are divided by ``split``, or by
        ``fetch_fraction`` without one, and the slot table follows. ``num_tiles``: of a record that may be divided."""

@final
class SideCost:
    """Of one party for one layer: fixed_ns + sum over its records of bytes * (byte_ns + (routes - 1) *
    route_byte_ns)."""

    def __init__(self, fixed_ns: float, byte_ns: float, route_byte_ns: float = 0.0) -> None: ...
    @property
    def fixed_ns(self) -> float: ...
    @property
    def byte_ns(self) -> float: ...
    @property
    def route_byte_ns(self) -> float: ...

@final
class SplitCosts:
    """What a layer's misses cost before anything was measured in service (see freetoken/costs.py)."""

    def __init__(
        self,
        fetch: SideCost,
        fetch_beside: SideCost,
        cpu: SideCost,
        cpu_beside: SideCost,
        hit_byte_ns: float = 0.0,
        hits_load_memory: bool = False,
    ) -> None:
        """``ValueError`` naming a negative or infinite value, or a party without a cost per byte."""

@final
class LayerShares:
    """What both parties do in one layer; ``extra``: routes beyond the first of each record."""

    def __init__(
        self,
        num_hits: int,
        num_fetches: int,
        num_cpu: int,
        record_bytes: float,
        hit_extra: int = 0,
        fetch_extra: int = 0,
        cpu_extra: int = 0,
    ) -> None: ...
    @property
    def num_hits(self) -> int: ...
    @property
    def num_fetches(self) -> int: ...
    @property
    def num_cpu(self) -> int: ...
    @property
    def hit_extra(self) -> int: ...
    @property
    def fetch_extra(self) -> int: ...
    @property
    def cpu_extra(self) -> int: ...
    @property
    def record_bytes(self) -> float: ...
    @property
    def split_part(self) -> float:
        """Of one further record: the share that the device fetches; the CPU runs the rest of it. 0: there is none."""

    @property
    def split_extra(self) -> int: ...

@final
class SplitPlanner:
    """The split by live rates as ``CacheServer`` uses it, for tests and simulations (csrc/core/split_planner.h)."""

    def __init__(self, costs: SplitCosts) -> None: ...
    def choose(
        self,
        miss_routes: Sequence[int],
        record_bytes: float,
        num_hits: int = 0,
        hit_extra: int = 0,
        num_fetchable: int = -1,
        num_free_slots: int = 0,
    ) -> int:
        """How many of the misses to fetch, from the front; ``num_fetchable`` -1: all can be."""

    def best(self, miss_routes: Sequence[int], record_bytes: float, num_hits: int = 0) -> int:
        """What ``choose`` aims at by the applied rates; changes nothing."""

    def observe(
        self, shares: LayerShares, device_ns: float, cpu_ns: float, wait_ns: float = 0.0, start_ns: float = 0.0
    ) -> None:
        """What a layer took, by a mailbox's stamps: the device's own work from its plan on, and its wait for the CPU's
        answer after that (0: none that its clock shows); the CPU's work, and how long after the plan that began.
        Otherwise 0: nothing to do, or not known."""

    def device_ns(self, shares: LayerShares, factors: Sequence[float]) -> float:
        """Of the costs times ``factors`` [7]: fetch, fetch_beside, cpu, cpu_beside; then nanoseconds for handing over
        to the CPU, and for the device's look at its answer; then of a GPU's resident records."""

    def cpu_ns(self, shares: LayerShares, factors: Sequence[float]) -> float: ...
    def status(self) -> dict[str, Any]:
        """layers, changes, probes; live and applied factors [7], timings [4];
        mean_misses, mean_fetches, predicted_ns, measured_ns of recent layers; last_change: at_layer, gain, before,
        after [7], fetched_before, fetched_after, misses."""

@final
class CacheServer:
    """ExpertCache's thread: answers publishes with plans and hands the CPU share on."""

    def __init__(
        self,
        mailbox: Mailbox,
        slots: SlotTable,
        fetch_fraction: float,
        in_place: bool,
        spin_us: int,
        record_bytes: Sequence[int],
        device_client: bool = False,
        fetchable: NDArray[np.bool_] | None = None,
        num_tiles: Sequence[int] = (),
    ) -> None:
        """``in_place``: every expert is a hit read from the store (no slots). ``record_bytes`` [L] for the counters.

        ``device_client``: the client rings no bells (a GPU). The thread spins for ``spin_us`` after each ``notice`` and
        each publish, then naps; it never relies on being woken. ``fetchable`` [L, E]: records that the device can read
        in the store; the others go to CpuExecutor. None: it can read all.
        ``num_tiles`` [L]: tiles of a record, where one may be split; empty: none is.
        """

    def start(self) -> None: ...
    def stop(self) -> None:
        """Stop and join the thread; idempotent. The mailbox is aborted first when a publish is unanswered."""

    def notice(self) -> None:
        """Publishes of a device client will come soon: wake up and spin."""

    def rest(self) -> None:
        """None will come before the next ``notice``: stop spinning."""

    def set_fetch_fraction(self, fraction: float) -> None:
        """From the next publish on, fetch this share of the misses."""

    def set_auto_split(self, costs: SplitCosts) -> None:
        """From the next publish on, split by live rates, which begin as ``costs``."""

    def watch_rates(self, costs: SplitCosts) -> None:
        """Measure rates, which begin as ``costs``, also beside a fixed share: when its plan is out."""

    def split_status(self) -> dict[str, Any] | None:
        """Of decode steps (up to 16 tokens), keys as ``SplitPlanner.status``; None while no rates are measured."""

    def set_lookahead(self, on: bool) -> None:
        """Whether hints are answered with records to copy ahead of time, where that pays. Off at first."""

    def lookahead_status(self) -> dict[str, float]:
        """accuracy (of recent guesses, the mean of all layers) and idle_ns (of the bus, from one layer to the next)."""

    # Of the table it owns, as there; any thread, and but for `empty` any time.
    def vacate(self, num_slots: int) -> Vacated: ...
    def finish_vacate(self) -> None: ...
    def cancel_vacate(self) -> None: ...
    def grow(self, num_slots: int) -> None: ...
    def empty(self, num_slots: int) -> None: ...
    def score_curve(self, capacities: Sequence[int]) -> list[float]: ...
    def log_routes(self, mode: str, sampled_layers: Sequence[int]) -> None:
        """Keep what is published from now on: ``off``, ``sample`` (decode batches of these layers) or ``all``."""

    def drain_routes(self) -> bytes:
        """The records kept since the last call, in the form of a route trace's file."""

    @property
    def dropped_routes(self) -> int:
        """Publishes that were not kept because nobody drained."""

    def counters(self) -> dict[str, int]:
        """hits, fetches, cpu, admitted, evicted, fetched_bytes, cpu_bytes, publishes, plan_ns, hints, copied_ahead and
        used_ahead (cumulative; fetched_bytes have all that was copied ahead, fetches what of it was used), resident,
        in_flight. Of publishes whose stamps were found in order, sums of nanoseconds: own_ns (the client's hits and
        fetches, own_timed of them); and of cpu_timed ones with a CPU share: cpu_ns (its work), cpu_start_ns (from the
        plan until it began), cpu_wait_ns (the client waited for it), turn_ns (from its end to the next publish)."""

    def layer_counters(self) -> NDArray[np.int64]:
        """[L, 3] cumulative hits, fetches, cpu."""

@final
class CpuServer:
    """CpuExecutor's dispatcher: takes the CPU share of each layer and runs it on the pool."""

    def __init__(
        self, mailbox: Mailbox, store: ExpertStore, pool: WorkerPool, spin_us: int, device_client: bool = False
    ) -> None:
        """``device_client``: see ``CacheServer``."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def notice(self) -> None:
        """See ``CacheServer.notice``."""

    def rest(self) -> None:
        """See ``CacheServer.rest``."""

    def counters(self) -> dict[str, int]:
        """experts, routes, layers, bytes, busy_ns (cumulative)."""

@final
class DeviceClient:
    """The CPU device's side of the mailbox: publishes a layer, runs hits and fetches itself, adds the CPU partial."""

    def __init__(
        self,
        mailbox: Mailbox,
        store: ExpertStore,
        slots: SharedSegment | None,
        slot_stride_bytes: int,
        pool: WorkerPool,
        spin_us: int,
        wait_timeout_s: float,
        deterministic: bool,
    ) -> None:
        """``slots`` is the arena (None when records are read in place); slot s lies at ``s * slot_stride_bytes``."""

    def begin_step(self, step_id: int) -> None: ...
    def set_num_slots(self, num_slots: int) -> None:
        """Slots that plans may name from now on; between steps."""

    def forward(self, layer: int, hidden: F32, ids: I32, weights: F32, admit: NDArray[np.uint8], out: F32) -> None:
        """out[T,H] = the routed experts' weighted sum. ``admit[t]`` = 0 keeps token t from filling slots.

        Raises ``TimeoutError`` naming the late party, ``RuntimeError('aborted')`` when the mailbox was aborted.
        """

    def step_counters(self) -> dict[str, int]:
        """hits, fetches, cpu, admitted, evicted, fetched_bytes, cpu_bytes, layer_steps since ``begin_step``."""
