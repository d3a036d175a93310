"""The data plane through its Python surface, in one process."""

import threading

import numpy as np
import pytest

from freetoken import _native
from freetoken.costs import assumed_costs
from freetoken.experts.split import native_costs
from freetoken.testing.expert_bank import ExpertBank

L, E, K, H, MAX_TOKENS = 3, 8, 2, 48, 6


@pytest.fixture(scope="module")
def bank():
    return ExpertBank(L, E, H, 32)


class Group:
    """The three parties in this process; stopped at the end of the test."""

    def __init__(self, bank, num_slots=6, fraction=0.5, in_place=False, deterministic=False, policy="crf", timeout=60,
                 split=False):  # fmt: skip
        size = _native.Mailbox.required_bytes(MAX_TOKENS, K, H, L, E)
        self.segment = _native.SharedSegment.create("mailbox", size)
        self.mailbox = _native.Mailbox.create(self.segment, 5, MAX_TOKENS, K, H, L, E)
        self.slots = _native.SlotTable(L, E, num_slots, policy)
        stride = bank.layout.stride_bytes
        self.cache = _native.CacheServer(self.mailbox, self.slots, fraction, in_place, 0, [stride] * L, False, None,
                                         [bank.layout.num_tiles] * L if split else [])  # fmt: skip
        self.cpu = _native.CpuServer(self.mailbox, bank.store, _native.WorkerPool(1), 0)
        self.arena = None
        if num_slots:
            self.arena = _native.SharedSegment.create("arena", num_slots * stride)
            np.frombuffer(memoryview(self.arena), np.uint8)[:] = 0xFF  # NaNs: reading a slot too early shows
        self.client = _native.DeviceClient(
            self.mailbox, bank.store, self.arena, stride, _native.WorkerPool(2), 0, timeout, deterministic
        )

    def start(self):
        self.cache.start()
        self.cpu.start()
        return self

    def stop(self):
        self.cache.stop()
        self.cpu.stop()

    def forward(self, layer, batch):
        out = np.full(batch[0].shape, np.nan, np.float32)
        self.client.forward(layer, *batch, out)
        return out


@pytest.fixture
def make_group(bank):
    groups = []

    def make(**settings):
        groups.append(Group(bank, **settings))
        return groups[-1]

    yield make
    for group in groups:
        group.stop()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_slots": 6},
        {"num_slots": 6, "policy": "lru"},
        {"num_slots": 2},
        {"num_slots": L * E, "fraction": 1.0},
        {"num_slots": 4, "fraction": 0.0},
        {"num_slots": 0},
        {"num_slots": 0, "in_place": True},
    ],
    ids=str,
)
def test_layers_compute_what_their_experts_do(bank, make_group, settings, deterministic):
    group = make_group(**settings, deterministic=deterministic).start()
    rng = np.random.default_rng(1)
    group.client.begin_step(1)
    for step in range(40):
        batch = bank.random_batch(rng, 1 + step % MAX_TOKENS, K, padding=0.2)
        out = group.forward(step % L, batch)
        np.testing.assert_allclose(out, bank.reference(step % L, *batch[:3]), atol=2e-4)
    step = group.client.step_counters()
    totals = group.cache.counters()
    assert step["layer_steps"] == totals["publishes"] == 40
    for name in ("hits", "fetches", "cpu", "admitted", "evicted", "fetched_bytes", "cpu_bytes"):
        assert step[name] == totals[name]
    assert group.cache.layer_counters().sum(axis=0).tolist() == [totals[n] for n in ("hits", "fetches", "cpu")]
    assert group.cpu.counters()["experts"] == totals["cpu"]
    group.stop()
    group.slots.check_integrity()
    assert not group.mailbox.aborted
    group.client.begin_step(2)
    assert not any(group.client.step_counters().values())


@pytest.mark.parametrize("settings", [{"num_slots": 0, "fraction": 0.3}, {"num_slots": 6}, {"policy": "lru"}], ids=str)
def test_a_record_is_split_by_its_tiles(make_group, settings):
    bank = ExpertBank(L, E, H, 192)  # three tiles
    tiles = bank.layout.num_tiles
    assert tiles == 3
    group = Group(bank, **settings, split=True).start()
    rng = np.random.default_rng(2)
    group.client.begin_step(1)
    for step in range(40):
        batch = bank.random_batch(rng, 1 + step % MAX_TOKENS, K, padding=0.2)
        out = group.forward(step % L, batch)
        np.testing.assert_allclose(out, bank.reference(step % L, *batch[:3]), atol=2e-3)
    step, totals, cpu = group.client.step_counters(), group.cache.counters(), group.cpu.counters()
    group.stop()
    for name in ("hits", "fetches", "cpu", "fetched_bytes", "cpu_bytes"):
        assert step[name] == totals[name]
    stride = bank.layout.stride_bytes
    assert totals["split"] > 0
    assert cpu["experts"] == totals["cpu"] + totals["split"]
    misses = totals["fetches"] + totals["cpu"]
    assert totals["fetched_bytes"] + totals["cpu_bytes"] == misses * stride
    if settings.get("fraction") == 0.3:
        assert abs(totals["fetched_bytes"] / (misses * stride) - 0.3) < 0.05
    assert cpu["bytes"] == pytest.approx(totals["cpu_bytes"], abs=40)


def test_deterministic_rows_equal_the_store_bit_by_bit(bank, make_group):
    pool = _native.WorkerPool(1)
    for settings in ({"num_slots": 3}, {"num_slots": 0, "fraction": 0.0}, {"num_slots": 24, "fraction": 1.0}):
        group = make_group(**settings, deterministic=True).start()
        rng = np.random.default_rng(2)
        for step in range(20):
            batch = bank.random_batch(rng, 1 + step % MAX_TOKENS, K, padding=0.2)
            expected = np.empty_like(batch[0])
            _native.expert_ffn(pool, bank.store, step % L, *batch[:3], expected, True)
            np.testing.assert_array_equal(group.forward(step % L, batch), expected)


def test_no_admission_without_admit(bank, make_group):
    group = make_group(num_slots=L * E, fraction=1.0).start()
    hidden, ids, weights, admit = bank.random_batch(np.random.default_rng(3), 3, K)
    admit[:] = 0
    for _ in range(3):
        group.forward(0, (hidden, ids, weights, admit))
    assert group.cache.counters()["admitted"] == 0
    admit[1] = 1
    group.forward(0, (hidden, ids, weights, admit))
    assert group.cache.counters()["admitted"] == K
    group.forward(0, (hidden, ids, weights, admit))
    group.stop()
    assert {(layer, expert) for _, layer, expert in group.slots.resident()} == {(0, int(e)) for e in ids[1]}


def test_fetch_fraction_can_change_while_serving(bank, make_group):
    group = make_group(num_slots=0, fraction=0.0).start()
    batch = bank.random_batch(np.random.default_rng(4), 4, K)
    group.forward(0, batch)
    assert group.cache.counters()["fetches"] == 0
    group.cache.set_fetch_fraction(1.0)
    before = group.cache.counters()["cpu"]
    group.forward(0, batch)
    assert group.cache.counters()["cpu"] == before > 0
    with pytest.raises(ValueError, match=r"1\.5"):
        group.cache.set_fetch_fraction(1.5)


def test_rates_are_measured_beside_a_fixed_share_that_they_do_not_change(bank, make_group):
    planned = []
    for watched in (False, True):
        group = make_group(num_slots=0, fraction=0.5).start()
        if watched:
            group.cache.watch_rates(native_costs(assumed_costs("cpu")))
        batch = bank.random_batch(np.random.default_rng(4), 4, K)
        for step in range(20):
            group.forward(step % L, batch)
        planned.append({name: group.cache.counters()[name] for name in ("hits", "fetches", "cpu", "admitted", "split")})
        status = group.cache.split_status()
        if not watched:
            assert status is None
            continue
        assert min(status["timings"][1], status["timings"][3]) >= 15  # of both beside each other
        assert status["live"][1] != 1.0 != status["live"][3]
        assert status["layers"] >= 19 and status["probes"] == status["changes"] == 0
        assert 0 < status["mean_fetches"] < status["mean_misses"] and status["measured_ns"] > 0
    assert planned[0] == planned[1]


def test_bad_arguments_name_themselves_and_publish_nothing(bank, make_group):
    group = make_group().start()
    hidden, ids, weights, admit = bank.random_batch(np.random.default_rng(5), 4, K)
    out = np.empty_like(hidden)

    def refused(match, layer=0, hidden=hidden, ids=ids, weights=weights, admit=admit, out=out):
        with pytest.raises(ValueError, match=match):
            group.client.forward(layer, hidden, ids, weights, admit, out)

    refused("layer 3", layer=3)
    refused("layer -1", layer=-1)
    refused("hidden.*float32", hidden=hidden.astype(np.float64))
    refused("hidden.*contiguous", hidden=np.asfortranarray(hidden))
    refused("hidden.*dimensions", hidden=hidden[0])
    refused("ids.*int32", ids=ids.astype(np.int64))
    refused("ids", ids=ids[:, :1].copy())
    refused("weights", weights=weights[:3])
    refused("admit", admit=admit.astype(np.float32))
    refused("out", out=out[:, :-1].copy())
    read_only = np.empty_like(hidden)
    read_only.flags.writeable = False
    refused("out.*writeable", out=read_only)
    many = np.zeros((MAX_TOKENS + 1, H), np.float32)
    refused("7 tokens; the mailbox holds 6", hidden=many)
    for bad in (E, -2, 2**31 - 1):
        wrong = ids.copy()
        wrong[2, 1] = bad
        refused(rf"ids\[2, 1\] is {bad}; experts are 0\.\.7", ids=wrong)
    assert group.cache.counters()["publishes"] == 0
    np.testing.assert_allclose(
        group.forward(0, (hidden, ids, weights, admit)), bank.reference(0, hidden, ids, weights), atol=2e-4
    )


def test_no_tokens_is_no_work(make_group):
    group = make_group()  # not even started
    group.client.forward(
        0,
        np.empty((0, H), np.float32),
        np.empty((0, K), np.int32),
        np.empty((0, K), np.float32),
        np.empty(0, np.uint8),
        np.empty((0, H), np.float32),
    )


@pytest.mark.parametrize(
    "present,late", [("cpu", "ExpertCache did not answer"), ("cache", "CpuExecutor did not answer")]
)
def test_late_party_is_named(bank, make_group, present, late):
    group = make_group(fraction=0.0, timeout=1.0)  # the one who is there has that long
    getattr(group, present).start()
    batch = bank.random_batch(np.random.default_rng(6), 2, K)
    with pytest.raises(TimeoutError, match=f"^{late} expert layer 1 within 1 s"):
        group.forward(1, batch)
    assert group.mailbox.aborted
    with pytest.raises(RuntimeError, match=r"^aborted"):
        group.forward(1, batch)


def test_abort_ends_a_waiting_forward(bank, make_group):
    group = make_group(fraction=0.0)
    group.cache.start()  # nobody answers the CPU share
    batch = bank.random_batch(np.random.default_rng(7), 2, K)
    failures = []

    def step():
        with pytest.raises(RuntimeError, match=r"^aborted$") as caught:
            group.forward(0, batch)
        failures.append(caught)

    thread = threading.Thread(target=step)
    thread.start()
    _native.Mailbox.attach(group.segment).abort()
    thread.join(60)
    assert len(failures) == 1


def test_stopping_a_server_aborts_what_it_leaves_unanswered(bank, make_group):
    group = make_group(fraction=0.0).start()
    batch = bank.random_batch(np.random.default_rng(8), 2, K)
    group.forward(0, batch)
    group.stop()
    assert not group.mailbox.aborted  # nothing was outstanding
    with pytest.raises(RuntimeError, match="started before"):
        group.cache.start()


def test_mailbox_refusals():
    required = _native.Mailbox.required_bytes
    with pytest.raises(ValueError, match="hidden 0"):
        required(MAX_TOKENS, K, 0, L, E)
    with pytest.raises(ValueError, match="top_k -1"):
        required(MAX_TOKENS, -1, H, L, E)
    small = _native.SharedSegment.create("small", 4096)
    with pytest.raises(ValueError, match="smaller"):
        _native.Mailbox.create(small, 1, MAX_TOKENS, K, H, L, E)
    with pytest.raises(ValueError, match="no mailbox"):
        _native.Mailbox.attach(small)


def test_a_running_server_owns_its_table(bank, make_group):
    group = make_group().start()
    for use in (
        lambda: group.slots.num_resident,
        lambda: group.slots.lookup(0, 0),
        lambda: group.slots.resident(),
        lambda: group.slots.check_integrity(),
        lambda: group.slots.empty(4),
        lambda: group.slots.access(0, [1], [1], [True], 1),
    ):
        with pytest.raises(RuntimeError, match="owns it"):
            use()
    group.stop()
    assert group.slots.num_resident == 0
