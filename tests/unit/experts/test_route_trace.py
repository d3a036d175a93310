"""The file of a route trace: whole, cut off, damaged."""

import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.experts.route_trace import (
    RouteTrace,
    TraceError,
    TraceInfo,
    decode_records,
    encode_header,
    encode_record,
    measure_records,
    measure_trace,
    read_trace,
    write_trace,
)
from freetoken.experts.trace_sources import SyntheticRoutes, draw_trace, import_csv

INFO = TraceInfo("some model", 3, 10, 2, (4096, 4096, 8192), "test")


def assert_same(one: RouteTrace, other: RouteTrace) -> None:
    assert one.info == other.info and one.truncated == other.truncated
    for name in ("layers", "token_counts", "step_ids", "ids", "weights", "admit"):
        left, right = getattr(one, name), getattr(other, name)
        assert left.dtype == right.dtype and np.array_equal(left, right), name


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 2**63 - 1)), max_size=8), st.integers(0))
def test_what_is_written_is_read_and_measured(publishes, seed):
    random = np.random.default_rng(seed)
    rows = sum(count for _, count, _ in publishes)
    trace = RouteTrace(
        INFO,
        np.array([layer for layer, _, _ in publishes], np.int32),
        np.array([count for _, count, _ in publishes], np.int32),
        np.array([step for _, _, step in publishes], np.int64),
        random.integers(-1, 10, (rows, 2)).astype(np.int32),
        random.integers(0, 256, (rows, 2)).astype(np.float32) / 256,  # exact in bfloat16
        random.integers(0, 3, rows).astype(np.uint8),
    )
    records = b""
    begin = 0
    for layer, count, step in publishes:
        part = slice(begin, begin + count)
        records += encode_record(step, layer, trace.ids[part], trace.weights[part], trace.admit[part])
        begin += count
    assert_same(decode_records(INFO, records), trace)
    assert measure_records(records, 1 << 20) == (len(publishes), rows, len(records))
    for limit in range(0, len(records), 8):
        count, _, size = measure_records(records, limit)
        cut = decode_records(INFO, records[:limit])
        assert count == cut.num_publishes and size <= limit and not decode_records(INFO, records[:size]).truncated


def test_files(tmp_path):
    trace = draw_trace(SyntheticRoutes(num_tokens=5, num_layers=3, num_experts=10, top_k=2, streams=2))
    path = tmp_path / "trace"
    write_trace(path, trace)
    again = read_trace(path)
    assert_same(again, trace)
    assert again.num_publishes == 15 and again.num_tokens == 10
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    cut = read_trace(path)
    one_publish = (len(whole) - len(encode_header(trace.info))) // 15
    assert measure_trace(path) == (trace.info, 14, 28, len(whole) - one_publish)
    assert cut.truncated and cut.num_publishes == 14 and np.array_equal(cut.ids, trace.ids[:-2])


def test_weights_are_rounded_to_bfloat16():
    weights = np.array([[0.1, 1 / 3]], np.float32)
    record = encode_record(0, 0, np.zeros((1, 2), np.int32), weights, np.ones(1, np.uint8))
    assert np.abs(decode_records(INFO, record).weights / weights - 1).max() <= 2**-9


@pytest.mark.parametrize(
    "data,match",
    [
        (b"", "not a route trace"),
        (b"FTROUTES\x02\0\0\0\0\0\0\0", "version 2"),
        (b"FTROUTES\x01\0\0\0\xff\0\0\0{}", "not complete"),
        (b"FTROUTES\x01\0\0\0\x02\0\0\0{}", "damaged"),
        (encode_header(INFO).replace(b'"top_k": 2', b'"top_k":11'), "top_k 11"),
        (encode_header(INFO) + encode_record(0, 3, *[np.zeros((1, 2), np.int32)] * 2, np.zeros(1)), "layer 3 of 3"),
        (
            encode_header(INFO) + encode_record(0, 0, *[np.full((1, 2), 10, np.int32)] * 2, np.zeros(1)),
            "expert 10 of 10",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, data, match):
    path = tmp_path / "trace"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=match):
        read_trace(path)


CSV = """# route_trace v1
# model=tiny arch=x n_layer=3 n_expert=8 n_expert_used=2
# layer=1 expert_bytes=100 dense_bytes=7
# layer=2 expert_bytes=200 dense_bytes=7
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,1,0,3,0.75,0,100
0,0,0,1,1,5,0.25,0,100
0,0,0,2,0,1,1.0,0,200
0,1,1,1,0,7,0.5,1,0
0,1,1,1,1,3,0.5,1,0
"""


def test_csv(tmp_path):
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(CSV.encode()))
    trace = import_csv(path)
    assert trace.info == TraceInfo("tiny", 2, 8, 2, (100, 200), "imported")
    assert trace.layers.tolist() == [0, 1, 0] and trace.step_ids.tolist() == [0, 0, 1]
    assert trace.ids.tolist() == [[3, 5], [1, -1], [7, 3]] and trace.weights[0].tolist() == [0.75, 0.25]
    assert [uses.tolist() for uses in trace.uses()] == [[3, 5], [9], [3, 7]]


@pytest.mark.parametrize(
    "change,match",
    [
        (("phase", "part"), "phase"),
        (("n_expert=8", "n_expert=6"), "expert 7 of 6"),
        (("1,1,5", "1,1,3"), "not 2 distinct"),
        (("0.75", "x"), "cannot be read"),
    ],
)
def test_other_csv_is_refused(tmp_path, change, match):
    path = tmp_path / "trace.csv"
    path.write_text(CSV.replace(*change))
    with pytest.raises(TraceError, match=match):
        import_csv(path)


def test_synthetic_routes():
    trace = draw_trace(SyntheticRoutes(num_tokens=400, num_layers=2, num_experts=16, top_k=3, alpha=1.0, seed=4))
    assert all(len(set(row)) == 3 for row in trace.ids.tolist())
    frequency = np.sort(np.bincount(trace.ids[::2].ravel(), minlength=16))[::-1]
    assert frequency[0] > 3 * frequency[-1] > 0

    def kept(locality):
        ids = draw_trace(SyntheticRoutes(200, 1, 64, 4, 0.0, locality)).ids
        return np.mean([len(set(a) & set(b)) / 4 for a, b in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True)])

    assert kept(0.0) < 0.15 and 0.6 < kept(0.7) < 0.8
    with pytest.raises(TraceError, match="locality 1"):
        SyntheticRoutes(locality=1.0)
