"""Shared segments, worker pools, checksums and the reader, as Python sees them."""

from __future__ import annotations

import errno
import gc
import os
import threading
import warnings

import numpy as np
import pytest

from freetoken import _native


def as_bytes(segment: _native.SharedSegment) -> np.ndarray:
    return np.frombuffer(memoryview(segment), np.uint8)


# ---------------------------------------------------------------------------------------------- segments


def test_segments_share_memory():
    segment = _native.SharedSegment.create("a name", 10_000)
    twin = _native.SharedSegment.attach(segment.fd, 10_000, "twin")
    as_bytes(segment)[9_999] = 7
    assert as_bytes(twin)[9_999] == 7
    assert (segment.name, segment.size_bytes, twin.name) == ("a name", 10_000, "twin")
    assert twin.fd != segment.fd
    assert not os.get_inheritable(twin.fd)


def test_a_segment_lives_as_long_as_a_view_of_it():
    view = as_bytes(_native.SharedSegment.create("s", 4096))
    gc.collect()
    view[:] = 3
    assert view.sum() == 3 * 4096


def test_attach_to_a_file_that_is_too_small():
    segment = _native.SharedSegment.create("s", 4096)
    with pytest.raises(OSError, match="4096 bytes, expected 8192"):
        _native.SharedSegment.attach(segment.fd, 8192)


def test_attach_to_no_file():
    with pytest.raises(OSError, match="-1") as caught:
        _native.SharedSegment.attach(-1, 4096)
    assert caught.value.errno == errno.EBADF


def test_populate_allocates_every_page():
    segment = _native.SharedSegment.create("s", 1 << 20)
    assert os.fstat(segment.fd).st_blocks == 0
    segment.populate()
    assert os.fstat(segment.fd).st_blocks * 512 >= 1 << 20


def test_populate_beyond_memory_is_a_memory_error():
    segment = _native.SharedSegment.create("s", 1 << 46)
    with pytest.raises(MemoryError, match=str(1 << 46)):
        segment.populate()


# ---------------------------------------------------------------------------------------------- machine


def test_physical_cores_are_in_the_affinity_mask():
    cores = _native.physical_cores()
    assert cores
    assert cores == sorted(set(cores))
    assert set(cores) <= os.sched_getaffinity(0)


def test_pools_pin_without_moving_the_caller():
    before = os.sched_getaffinity(0)
    core = _native.physical_cores()[0]
    pool = _native.WorkerPool(2, core_ids=[core, core], spin_us=10)
    assert pool.num_threads == 2
    pool.close()
    assert os.sched_getaffinity(0) == before


def test_a_failed_pin_is_a_warning():
    with pytest.warns(RuntimeWarning, match="core 200000"):
        _native.WorkerPool(2, core_ids=[0, 200_000]).close()


def test_isa_caps_the_kernels():
    assert _native.WorkerPool(1, isa="scalar").isa == "scalar"
    best = _native.WorkerPool(1).isa
    assert best in ("scalar", "avx2", "avx512", "avx512_bf16")
    if not _native.cpu_features()["avx512f"]:
        with pytest.raises(ValueError, match="avx512"):
            _native.WorkerPool(1, isa="avx512")


def test_a_closed_pool_refuses_work():
    pool = _native.WorkerPool(2)
    pool.close()
    pool.close()
    x = np.ones((1, 4), np.float32)
    with pytest.raises(RuntimeError, match="closed"):
        _native.rms_norm(pool, x, x[0], 1e-6, x.copy())


def test_one_pool_from_many_threads():
    pool = _native.WorkerPool(3)
    x = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    expected = x @ x[:40].T
    wrong: list[float] = []

    def work() -> None:
        for _ in range(30):
            out = np.empty((64, 40), np.float32)
            _native.linear(pool, x, np.ascontiguousarray(x[:40]), None, out)
            error = float(np.abs(out - expected).max())
            if error > 1e-3:
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_stream_read_gives_a_rate():
    segment = _native.SharedSegment.create("s", (3 << 20) + 100)
    with _closing(_native.WorkerPool(2)) as pool:
        assert _native.stream_read_gbps(pool, segment, 1) > 0
    with pytest.raises(ValueError, match="repetitions"):
        _native.stream_read_gbps(_native.WorkerPool(1), segment, 0)


class _closing:
    def __init__(self, pool: _native.WorkerPool) -> None:
        self._pool = pool

    def __enter__(self) -> _native.WorkerPool:
        return self._pool

    def __exit__(self, *exc: object) -> None:
        self._pool.close()


# ---------------------------------------------------------------------------------------------- checksums


def test_crc32c_known_values():
    """The check value of the CRC catalogue and the iSCSI examples (RFC 3720, appendix B.4)."""
    assert _native.crc32c(b"123456789") == 0xE3069283
    assert _native.crc32c(bytes(32)) == 0x8A9136AA
    assert _native.crc32c(bytes(range(32))) == 0x46DD794E
    assert _native.crc32c(b"") == 0


def test_crc32c_continues():
    data = np.random.default_rng(1).bytes(100_003)
    whole = _native.crc32c(data)
    for cut in (0, 1, 7, 4096, 12_288, 50_001, len(data)):
        assert _native.crc32c(memoryview(data)[cut:], _native.crc32c(data[:cut])) == whole


def test_crc32c_of_a_strided_view_is_refused():
    with pytest.raises(ValueError, match="data"):
        _native.crc32c(np.zeros(10, np.uint8)[::2])


def test_crc32c_ranges():
    segment = _native.SharedSegment.create("s", 1 << 18)
    data = as_bytes(segment)
    data[:] = np.random.default_rng(2).integers(0, 256, 1 << 18)
    offsets, sizes = np.array([0, 5, 1000, 1 << 18]), np.array([1 << 18, 12_289, 0, 0])
    found = _native.crc32c_ranges(segment, offsets, sizes, 3)
    assert found.dtype == np.uint32
    assert found.tolist() == [_native.crc32c(data[o : o + s]) for o, s in zip(offsets, sizes, strict=True)]


# ---------------------------------------------------------------------------------------------- reader


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(3)
    paths = []
    for i, size in enumerate([1, 4095, 4096, 4097, 70_000, 1 << 20]):
        path = tmp_path / f"{i}.bin"
        path.write_bytes(rng.bytes(size))
        paths.append(path)
    return paths


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_reader_reads_whole_files(files, direct, threads):
    total = sum((path.stat().st_size + 4095) // 4096 * 4096 for path in files)
    segment = _native.SharedSegment.create("s", total)
    reader = _native.DirectReader(threads, 16_384, direct)
    offset = 0
    for path in files:
        reader.submit(str(path), path.stat().st_size, segment, offset)
        offset += (path.stat().st_size + 4095) // 4096 * 4096
    reader.wait()
    assert reader.progress() == sum(path.stat().st_size for path in files)
    if not direct:
        assert not reader.used_direct
    offset = 0
    for path in files:
        data = path.read_bytes()
        assert as_bytes(segment)[offset : offset + len(data)].tobytes() == data
        offset += (len(data) + 4095) // 4096 * 4096


def test_reader_takes_unaligned_destinations(files):
    segment = _native.SharedSegment.create("s", 80_000)
    reader = _native.DirectReader(2, 4096)
    reader.submit(str(files[4]), 70_000, segment, 13)
    reader.wait()
    assert as_bytes(segment)[13:70_013].tobytes() == files[4].read_bytes()
    assert not reader.used_direct


def test_reader_can_be_used_again(files):
    segment = _native.SharedSegment.create("s", 1 << 20)
    reader = _native.DirectReader(2, 4096)
    reader.wait()
    for path in files:
        reader.submit(str(path), path.stat().st_size, segment)
        reader.wait()
        data = path.read_bytes()
        assert as_bytes(segment)[: len(data)].tobytes() == data


@pytest.mark.parametrize("wrong", [1, -1])
def test_a_file_of_another_size_is_an_error(files, wrong):
    segment = _native.SharedSegment.create("s", 1 << 20)
    reader = _native.DirectReader(2, 4096)
    reader.submit(str(files[4]), 70_000 + wrong, segment)
    with pytest.raises(OSError, match=rf"4\.bin.*70000 bytes, expected {70_000 + wrong}"):
        reader.wait()


def test_a_missing_file_is_an_error_and_ends_the_rest(files, tmp_path):
    segment = _native.SharedSegment.create("s", 1 << 20)
    reader = _native.DirectReader(1, 4096)
    reader.submit(str(tmp_path / "absent.bin"), 100, segment)
    reader.submit(str(files[5]), 1 << 20, segment)
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r"absent\.bin"):
            reader.wait()


def test_cancel_before_the_end(files):
    segment = _native.SharedSegment.create("s", 1 << 20)
    reader = _native.DirectReader(1, 4096)
    for _ in range(50):
        reader.submit(str(files[5]), 1 << 20, segment)
    reader.cancel()
    try:
        reader.wait()
    except OSError as error:
        assert error.errno == errno.ECANCELED
    else:
        assert reader.progress() == 50 << 20
    with pytest.raises(ValueError, match="cancelled"):
        reader.submit(str(files[0]), 1, segment)


def test_dropping_a_busy_reader_is_safe(files):
    segment = _native.SharedSegment.create("s", 1 << 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            reader = _native.DirectReader(2, 4096)
            for _ in range(20):
                reader.submit(str(files[5]), 1 << 20, segment)
            del reader
            gc.collect()
