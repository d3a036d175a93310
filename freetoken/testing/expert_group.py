"""The three parties of an expert layer in one process: cache server, CPU server and device client on one mailbox."""

from __future__ import annotations

from types import TracebackType

from freetoken import _native
from freetoken.execution.arena import Arena
from freetoken.execution.experts import MailboxExperts
from freetoken.models.spec import ModelSpec
from freetoken.quant.record import RecordLayout


class ExpertGroup:
    """Started on entry, stopped on exit. ``experts`` runs layers through the mailbox."""

    def __init__(
        self,
        spec: ModelSpec,
        store: _native.ExpertStore,
        layout: RecordLayout,
        arena: Arena,
        pool: _native.WorkerPool,
        *,
        fetch_fraction: float,
        max_tokens: int,
        in_place: bool = False,
        policy: str = "crf",
        deterministic: bool = False,
        split_records: bool = False,
        timeout_s: float = 20.0,
    ) -> None:
        """``arena.num_slots`` slots of ``layout.stride_bytes``; one record layout for all layers."""
        num_layers, num_experts = len(spec.moe_layers), spec.num_experts
        geometry = (max_tokens, spec.num_experts_per_tok, spec.hidden_size, num_layers, num_experts)
        segment = _native.SharedSegment.create("mailbox", _native.Mailbox.required_bytes(*geometry))
        self.mailbox = _native.Mailbox.create(segment, 1, *geometry)
        self.slots = _native.SlotTable(num_layers, num_experts, arena.num_slots, policy)
        self.cache_server = _native.CacheServer(
            self.mailbox,
            self.slots,
            fetch_fraction,
            in_place,
            0,
            [layout.stride_bytes] * num_layers,
            False,
            None,
            [layout.num_tiles] * num_layers if split_records else [],
        )
        self._cpu_pool = _native.WorkerPool(1)
        self.cpu_server = _native.CpuServer(self.mailbox, store, self._cpu_pool, 0)
        self.experts = MailboxExperts(
            _native.DeviceClient(
                self.mailbox, store, arena.slot_segment, layout.stride_bytes, pool, 0, timeout_s, deterministic
            )
        )

    def __enter__(self) -> ExpertGroup:
        self.cache_server.start()
        self.cpu_server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cache_server.stop()
        self.cpu_server.stop()
        self._cpu_pool.close()
        self.slots.check_integrity()
