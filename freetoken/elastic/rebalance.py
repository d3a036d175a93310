"""What a rebalance should do: from a wish, or from what memory is worth, to a division of the arena. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from freetoken.costs import CostModel
from freetoken.elastic.arena_shape import ArenaShape, ArenaSplit
from freetoken.errors import CapacityError
from freetoken.units import format_bytes

HELD_MARGIN_BLOCKS = 4
"""Blocks left beside those in use when KV shrinks: what running requests take until the change."""
_NEGLIGIBLE_MS_PER_S = 0.01
VERDICTS = ("asked", "kv_grows", "kv_is_full", "slots_worth_more", "slots_grow", "no_idle_kv", "small_gain")
"""An operator's wish; then what ``plan_auto`` finds: two that change the division and four that do not."""


def plan_rebalance(
    shape: ArenaShape,
    current: ArenaSplit,
    *,
    held_blocks: int,
    kv_tokens: int | None = None,
    expert_bytes: int | None = None,
) -> ArenaSplit:
    """The division that a wish asks for: KV for at least ``kv_tokens`` tokens, or slots of at most ``expert_bytes``.

    Returns ``current`` when nothing changes. Raises ``CapacityError`` naming the nearest value that works.
    """
    if (kv_tokens is None) == (expert_bytes is None):
        raise ValueError("exactly one of kv_tokens and expert_bytes is needed")
    floor = max(
        shape.min_kv_granules, shape.granules_for_blocks(held_blocks + HELD_MARGIN_BLOCKS if held_blocks else 0)
    )
    floor = min(floor, max(current.kv_granules, shape.min_kv_granules))
    most = shape.max_kv_granules
    if kv_tokens is not None:
        wanted = shape.granules_for_blocks(-(-kv_tokens // shape.block_size))
        if wanted > most:
            fits = shape.blocks_in(most) * shape.block_size
            raise CapacityError(
                f"kv_tokens={kv_tokens} needs {format_bytes(wanted * shape.granule_bytes)} of the "
                f"{format_bytes(shape.budget_bytes)} that slots and KV share; kv_tokens={fits} would work"
            )
        if wanted < floor:
            raise CapacityError(_too_little(f"kv_tokens={kv_tokens}", held_blocks, shape, floor, "kv_tokens"))
        return shape.split(wanted)
    assert expert_bytes is not None
    slots = expert_bytes // shape.granule_bytes
    least = shape.granules_for_slots(shape.min_slots)
    if slots < least:
        raise CapacityError(
            f"expert_bytes={expert_bytes} is less than {shape.min_slots} slots need; "
            f"expert_bytes={least * shape.granule_bytes} would work"
        )
    if shape.num_granules - slots < floor:
        if expert_bytes > shape.budget_bytes:
            best = (shape.num_granules - floor) * shape.granule_bytes
            raise CapacityError(
                f"expert_bytes={expert_bytes} is more than the {format_bytes(shape.budget_bytes)} that slots and KV "
                f"share; expert_bytes={best} would work"
            )
        raise CapacityError(_too_little(f"expert_bytes={expert_bytes}", held_blocks, shape, floor, "expert_bytes"))
    return shape.split(shape.num_granules - slots)


def _too_little(wish: str, held_blocks: int, shape: ArenaShape, floor: int, name: str) -> str:
    tokens = held_blocks * shape.block_size
    best = shape.blocks_in(floor) * shape.block_size
    if name == "expert_bytes":
        best = (shape.num_granules - floor) * shape.granule_bytes
    return (
        f"{wish} leaves too little KV: running requests hold blocks of {tokens} tokens, and "
        f"{shape.min_blocks} blocks are needed in any case; {name}={best} would work"
    )


@dataclass(frozen=True, slots=True)
class ElasticPolicy:
    """``step_share``: of all granules, moved at once when memory is traded by its worth. ``advantage``: one side must
    be worth so many times the other. ``reserve_share``: of KV, kept free above the peak of what requests held."""

    step_share: float = 1 / 16
    advantage: float = 1.5
    reserve_share: float = 0.25

    def step_granules(self, shape: ArenaShape) -> int:
        """Granules of one step."""
        return max(1, math.floor(shape.num_granules * self.step_share))


@dataclass(frozen=True, slots=True)
class ElasticFigures:
    """What the automatic decision looks at, over the time since the one before.

    ``hit_less``, ``hit_now``, ``hit_more``: estimated hit rates with a step of granules less, now, and a step more; all
    0 while unknown. ``uses_per_s``: expert uses. ``miss_ms``: what a miss costs. ``waiting_requests``: held back for
    lack of blocks now; ``starved_blocks``: what they, and those preempted, lack. ``recomputed_tokens_per_s``: computed
    again after preemptions. ``peak_held_blocks``: most blocks held by requests lately.
    """

    hit_less: float = 0.0
    hit_now: float = 0.0
    hit_more: float = 0.0
    uses_per_s: float = 0.0
    miss_ms: float = 0.0
    waiting_requests: float = 0.0
    starved_blocks: int = 0
    recomputed_tokens_per_s: float = 0.0
    cached_hit_tokens_per_s: float = 0.0
    prefill_ms_per_token: float = 0.0
    peak_held_blocks: int = 0


@dataclass(frozen=True, slots=True)
class ElasticDecision:
    """``split`` is what there should be; ``verdict`` (one of ``VERDICTS``) is the decision in a word, ``reason`` a
    sentence with the numbers. ``slot_ms_per_s`` and ``kv_ms_per_s``: milliseconds saved in each second by one more
    granule on that side (lost by one less)."""

    split: ArenaSplit
    trigger: str
    verdict: str
    reason: str
    slot_ms_per_s: float = 0.0
    kv_ms_per_s: float = 0.0


def price_of_miss_ms(
    costs: CostModel, record_bytes: float, top_k: int, hit_ratio: float, fetch_fraction: float | None
) -> float:
    """What a layer of ``top_k`` experts takes longer when one more of them is missing. Misses are divided between
    device and CPU: by ``fetch_fraction``, or so that both finish together."""

    def layer_ns(misses: float) -> float:
        hits = top_k - misses
        if fetch_fraction is None:
            return costs.shared_ns(misses, record_bytes, hits)
        fetches = fetch_fraction * misses
        return costs.layer_ns(hits, fetches, misses - fetches, record_bytes)

    # What both cost in any case is paid by the first miss of a layer, not by each.
    misses = min(max(top_k * (1.0 - hit_ratio), 1.0), float(top_k))
    beside = misses + 1.0 if misses + 1.0 <= top_k else misses - 1.0
    return max(0.0, (layer_ns(beside) - layer_ns(misses)) / (beside - misses)) / 1e6


def slot_value_ms_per_s(figures: ElasticFigures, step: int, *, more: bool) -> float:
    """Milliseconds per second that one granule of slots more saves, or one less costs, within a step."""
    hits = figures.hit_more - figures.hit_now if more else figures.hit_now - figures.hit_less
    return max(hits, 0.0) / step * figures.uses_per_s * figures.miss_ms


def kv_value_ms_per_s(figures: ElasticFigures, shape: ArenaShape) -> float:
    """Milliseconds per second that one more granule of KV saves: requests held back wait, preempted ones are computed
    again. A granule ends its share of that, by the blocks it has of those that are short."""
    if figures.starved_blocks <= 0:
        return 0.0
    lost = 1e3 * figures.waiting_requests + figures.recomputed_tokens_per_s * figures.prefill_ms_per_token
    return lost * min(shape.granule_bytes / shape.block_bytes / figures.starved_blocks, 1.0)


def plan_auto(
    shape: ArenaShape, current: ArenaSplit, figures: ElasticFigures, policy: ElasticPolicy | None = None
) -> ElasticDecision:
    """Trade memory where it is worth more; ``split == current`` when that is nowhere so.

    Requests starve for blocks and a granule of KV is worth ``advantage`` times one of slots: KV grows by what is
    missing. Nobody starves, KV beyond the recent peak and its reserve lies idle, and slots would gain hits: slots grow
    by at most a step. Otherwise nothing. Between the two conditions lie the reserve and twice the advantage: that is
    the hysteresis.
    """
    policy = policy or ElasticPolicy()
    step = policy.step_granules(shape)
    granule = format_bytes(shape.granule_bytes)
    if figures.starved_blocks > 0:
        value, cost = kv_value_ms_per_s(figures, shape), slot_value_ms_per_s(figures, step, more=False)
        missing = max(1, shape.granules_for_blocks(figures.starved_blocks))
        target = min(current.kv_granules + missing, shape.max_kv_granules)
        numbers = (
            f"{figures.waiting_requests:g} requests held back, {figures.starved_blocks} blocks short; a granule of "
            f"{granule} saves {value:.3g} ms/s as KV, {cost:.3g} ms/s as slots"
        )
        if target <= current.kv_granules:
            verdict, reason, split = "kv_is_full", "nothing: KV has all it can have; ", current
        elif value <= policy.advantage * cost:
            verdict, reason, split = "slots_worth_more", "nothing: slots are worth more; ", current
        else:
            verdict, reason, split = "kv_grows", "KV grows: ", shape.split(target)
        return ElasticDecision(split, "kv_pressure", verdict, reason + numbers, cost, value)
    keep = max(
        shape.min_kv_granules,
        shape.granules_for_blocks(shape.context_blocks),  # or prompts that were good at the start would be refused
        shape.granules_for_blocks(
            math.ceil(figures.peak_held_blocks * (1 + policy.reserve_share)) + HELD_MARGIN_BLOCKS
        ),
    )
    room = shape.granules_for_slots(shape.max_slots) - current.slot_granules
    shrink = min(current.kv_granules - keep, step, room)
    gain = slot_value_ms_per_s(figures, step, more=True)
    # What cached prefixes save in prefill, spread over all of KV.
    worth = figures.cached_hit_tokens_per_s * figures.prefill_ms_per_token / max(current.kv_granules, 1)
    numbers = (
        f"at most {figures.peak_held_blocks} blocks were held; a granule of {granule} saves {gain:.3g} ms/s as slots, "
        f"{worth:.3g} ms/s as cached prefixes"
    )
    if shrink <= 0:
        verdict, reason, split = "no_idle_kv", "nothing: no KV is idle; ", current
    elif gain <= max(policy.advantage * worth, _NEGLIGIBLE_MS_PER_S):
        verdict, reason, split = "small_gain", "nothing: slots would gain too little; ", current
    else:
        verdict, reason, split = "slots_grow", "slots grow: ", shape.split(current.kv_granules - shrink)
    return ElasticDecision(split, "idle_kv", verdict, reason + numbers, gain, worth)
