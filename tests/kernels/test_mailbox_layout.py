"""The mailbox as a device sees it: raw memory and the numbers of ``Mailbox.layout`` alone."""

import itertools

import numpy as np
import pytest

from freetoken import _native
from freetoken.testing.expert_bank import ExpertBank
from freetoken.testing.raw_mailbox import RawMailbox

T, K, H, L, E, SHARED = 6, 2, 48, 3, 8, 4
GEOMETRY = (T, K, H, L, E, SHARED)


@pytest.fixture
def mailbox():
    segment = _native.SharedSegment.create("mailbox", _native.Mailbox.required_bytes(*GEOMETRY))
    return _native.Mailbox.create(segment, 9, *GEOMETRY)


@pytest.fixture
def serve(mailbox):
    servers = []

    def start(num_slots=4, fraction=1.0, device_client=True, **settings):
        slots = _native.SlotTable(L, E, num_slots)
        server = _native.CacheServer(
            mailbox, slots, fraction, settings.pop("in_place", False), 0, [100] * L, device_client, **settings
        )
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()


def test_the_layout_is_complete_and_apart(mailbox):
    layout = mailbox.layout()
    assert layout["version"] == 6
    assert [layout[n] for n in ("max_tokens", "top_k", "hidden", "num_layers", "num_experts")] == list(GEOMETRY[:5])
    assert layout["max_shared_tokens"] == SHARED and layout["max_entries"] == min(E, T * K)
    assert layout["total_bytes"] == _native.Mailbox.required_bytes(*GEOMETRY) == mailbox.segment.size_bytes
    sizes = {
        **dict.fromkeys(("req", "plan", "part", "hint", "abort"), 4),
        "request": layout["request_bytes"],
        "hint_request": layout["hint_ids_field"] + layout["max_hinted"] * 4,
        "hidden": SHARED * H * 4,
        "ids": T * K * 4,
        "weights": T * K * 4,
        "admit": T,
        "plan_header": layout["plan_header_bytes"],
        "entries": (layout["max_entries"] + 1) * layout["entry_bytes"],
        "routes": T * K * 4,
        "brief": 32 * 16,
        "ahead": 16,
        "slot_of": L * E * 4,
        "stamps": L * layout["stamps_bytes"],
        "partial": SHARED * K * H * 4,
    }
    assert {f"{name}_offset" for name in sizes} == {name for name in layout if name.endswith("_offset")}
    regions = sorted((layout[f"{name}_offset"], size) for name, size in sizes.items())
    for (start, size), (following, _) in itertools.pairwise(regions):
        assert start % 128 == 0 and start + size <= following
    assert sum(regions[-1]) <= layout["total_bytes"]


def test_a_publish_is_written_and_its_plan_read_by_offsets_alone(mailbox, serve):
    server = serve(num_slots=4)
    raw = RawMailbox(mailbox.segment, mailbox.layout())
    assert (raw.slot_of == -1).all()
    ids = np.array([[1, 5], [5, 2], [-1, -1]], np.int32)
    seq = raw.publish(1, ids, admit=np.array([1, 0, 1], np.uint8), step_id=2**40)
    plan = raw.await_plan(seq)
    assert raw.request["step_id"] == 2**40 and raw.request["layer"] == 1
    assert plan.header == {
        "seq": seq, "num_hits": 0, "num_fetches": 3, "num_cpu": 0, "num_routes": 4, "num_admitted": 2, "num_evicted": 0,
        "num_split": 0,
    }  # fmt: skip
    assert {entry["kind"] for entry in plan.entries} == {raw.layout["kind_fetch"]}
    routes = {
        entry["expert"]: sorted(plan.routes[entry["first_route"] : entry["first_route"] + entry["num_routes"]])
        for entry in plan.entries
    }
    assert routes == {1: [0], 5: [1, 2], 2: [3]}
    destinations = {entry["expert"]: entry["destination_slot"] for entry in plan.entries}
    assert destinations[2] == -1 and sorted((destinations[1], destinations[5])) == [0, 1]
    assert all(entry["source_slot"] == -1 for entry in plan.entries)
    assert (raw.slot_of == -1).all()  # being filled: not readable yet

    seq = raw.publish(2, ids[:1])
    plan = raw.await_plan(seq)
    assert plan.header["num_fetches"] == 2
    start = raw.layout["brief_offset"]
    brief = np.frombuffer(memoryview(mailbox.segment)[start : start + (1 + K) * 16], np.int32).reshape(-1, 4)
    assert brief[:, 0].tolist() == [seq] * (1 + K) and brief[0, 1] == 2 << 8
    assert [piece & 0xFFFF for piece in brief[1:3, 1]] == [entry["expert"] for entry in plan.entries]
    assert [piece >> 24 for piece in brief[1:, 1]] == [raw.layout["kind_fetch"]] * 2 + [0] * (K - 2)
    assert brief[1:3, 2].tolist() == [entry["destination_slot"] for entry in plan.entries]
    assert raw.slot_of[1].tolist() == [destinations.get(e, -1) if e != 2 else -1 for e in range(E)]
    plan = raw.await_plan(raw.publish(1, ids[:1]))
    assert plan.header["num_hits"] == 2
    assert {entry["expert"]: entry["source_slot"] for entry in plan.entries} == {1: destinations[1], 5: destinations[5]}
    assert raw.part == 0
    server.stop()
    assert not mailbox.aborted


def test_the_cpu_share_comes_back_by_offsets_alone(mailbox, serve):
    bank = ExpertBank(L, E, H, 32)
    serve(num_slots=0, fraction=0.0)
    cpu = _native.CpuServer(mailbox, bank.store, _native.WorkerPool(1), 0, device_client=True)
    cpu.start()
    raw = RawMailbox(mailbox.segment, mailbox.layout())
    try:
        for deterministic in (False, True):
            hidden, ids, weights, admit = bank.random_batch(np.random.default_rng(1), SHARED, K)
            flags = raw.layout["flag_deterministic"] if deterministic else 0
            seq = raw.publish(2, ids, hidden, weights, admit, flags=flags)
            plan = raw.await_plan(seq)
            assert plan.header["num_cpu"] == len(plan.entries) > 0
            raw.await_part(seq)
            partial = raw.partial(SHARED * K if deterministic else SHARED)
            if deterministic:
                partial = partial.reshape(SHARED, K, H).sum(axis=1)  # rows are weighted already
            np.testing.assert_allclose(partial, bank.reference(2, hidden, ids, weights), atol=2e-4)
        assert mailbox.overdue == ""
    finally:
        cpu.stop()


def test_long_publishes_are_for_the_device_alone(mailbox, serve):
    serve(num_slots=4, fraction=0.0)
    raw = RawMailbox(mailbox.segment, mailbox.layout())
    ids = np.arange(T * K, dtype=np.int32).reshape(T, K) % E
    plan = raw.await_plan(raw.publish(0, ids, flags=raw.layout["flag_device_only"]))
    assert (plan.header["num_fetches"], plan.header["num_cpu"]) == (E, 0)  # whatever the split says
    plan = raw.await_plan(raw.publish(1, ids[:SHARED]))
    assert plan.header["num_cpu"] == E
    with pytest.raises(RuntimeError, match="bad_publish"):
        raw.await_plan(raw.publish(0, ids))
    assert raw.abort == raw.layout["abort_bad_publish"] and "out of range" in mailbox.abort_reason


def test_what_the_device_cannot_read_goes_to_the_cpu(mailbox, serve):
    fetchable = np.ones((L, E), np.bool_)
    fetchable[1, [0, 3]] = False
    server = serve(num_slots=4, fraction=0.5, fetchable=fetchable)
    raw = RawMailbox(mailbox.segment, mailbox.layout())
    ids = np.array([[0, 1], [2, 3]], np.int32)
    for _ in range(3):
        plan = raw.await_plan(raw.publish(1, ids))
        by_kind = {kind: [e["expert"] for e in plan.entries if e["kind"] == raw.layout[kind]]
                   for kind in ("kind_hit", "kind_fetch", "kind_cpu")}  # fmt: skip
        assert {0, 3} <= set(by_kind["kind_cpu"]), by_kind
    assert by_kind["kind_hit"]
    assert server.layer_counters()[1, 2] >= 6
    device_only = raw.layout["flag_device_only"]
    raw.await_plan(raw.publish(0, ids, flags=device_only))
    plan = raw.await_plan(raw.publish(1, ids, flags=device_only | raw.layout["flag_staged"]))
    assert plan.header["num_cpu"] == 0
    with pytest.raises(RuntimeError, match="not_fetchable"):
        raw.await_plan(raw.publish(1, ids, flags=device_only))
    assert raw.abort == raw.layout["abort_not_fetchable"]


def test_in_place_reads_what_it_can(mailbox, serve):
    fetchable = np.ones((L, E), np.bool_)
    fetchable[0, 2] = False
    serve(num_slots=0, in_place=True, fetchable=fetchable)
    raw = RawMailbox(mailbox.segment, mailbox.layout())
    plan = raw.await_plan(raw.publish(0, np.array([[1, 2]], np.int32)))
    kinds = {entry["expert"]: entry["kind"] for entry in plan.entries}
    assert kinds == {1: raw.layout["kind_hit"], 2: raw.layout["kind_cpu"]}


def test_servers_for_ringing_clients_refuse_one_that_cannot(mailbox, serve):
    raw = RawMailbox(mailbox.segment, mailbox.layout())
    seq = raw.publish(0, np.array([[1, 2]], np.int32), flags=raw.layout["flag_device_client"])
    serve(device_client=False)  # looks before it sleeps
    with pytest.raises(RuntimeError, match="no_bell"):
        raw.await_plan(seq)
    assert "cannot ring" in mailbox.abort_reason


def test_a_watchdog_names_who_is_late(mailbox, serve):
    raw = RawMailbox(mailbox.segment, mailbox.layout())
    assert mailbox.overdue == "" and mailbox.abort_reason == ""
    ids = np.array([[1, 2]], np.int32)
    seq = raw.publish(0, ids)
    assert mailbox.overdue == "ExpertCache"
    serve(num_slots=0, fraction=0.0)
    raw.await_plan(seq)
    assert mailbox.overdue == "CpuExecutor"
    with pytest.raises(ValueError, match="'tired'"):
        mailbox.abort("tired")
    mailbox.abort("partial_late")
    mailbox.abort()
    assert mailbox.abort_reason == "CpuExecutor was late"
    assert raw.abort == raw.layout["abort_partial_late"]
    with pytest.raises(RuntimeError, match="partial_late"):
        raw.await_part(seq)


def test_geometry_is_checked(mailbox):
    with pytest.raises(ValueError, match=r"max_shared_tokens 7 is not in 1\.\.6"):
        _native.Mailbox.required_bytes(T, K, H, L, E, T + 1)
    segment = mailbox.segment
    with pytest.raises(ValueError, match="fetchable must have dtype bool"):
        _native.CacheServer(
            mailbox, _native.SlotTable(L, E, 1), 1.0, False, 0, [1] * L, fetchable=np.ones((L, E), np.uint8)
        )
    with pytest.raises(ValueError, match="fetchable must have 8 entries along axis 1"):
        _native.CacheServer(
            mailbox, _native.SlotTable(L, E, 1), 1.0, False, 0, [1] * L, fetchable=np.ones((L, E - 1), np.bool_)
        )
    assert _native.Mailbox.attach(segment).layout() == mailbox.layout()
