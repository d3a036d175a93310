"""A made-up model straight into FTW: no source, no conversion, every thread on a data file of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.ftw_writer import FtwWriter, plan_index
from freetoken.checkpoint.integrity import digest_json
from freetoken.checkpoint.synthetic.names import PARTS
from freetoken.checkpoint.synthetic.parallel import for_each, ordered_map
from freetoken.checkpoint.synthetic.parts import Counter, Progress
from freetoken.checkpoint.synthetic.weights import Stored, SyntheticWeights
from freetoken.quant.pack import pack_expert
from freetoken.quant.q4_0_record import pack_q4_0_expert
from freetoken.quant.record import RecordLayout

_CHUNKS_AHEAD = 2  # a thread
_RECORDS_BYTES = 4 * 1024**3


_Run = list[tuple[int, int]]
"""Records that lie in one data file, in its order: (expert layer ordinal, expert)."""


def write_ftw(
    weights: SyntheticWeights,
    destination: Path,
    source: dict[str, Any],
    companions: Callable[[Path, dict[str, Any]], None],
    num_threads: int,
    progress: Progress | None = None,
    *,
    overwrite: bool = False,
    max_file_bytes: int | None = None,
) -> FtwIndex:
    """Write the FTW directory ``destination``; an interrupted run goes on when it is called again.

    ``source`` describes the generation, for the index; without what it says of ``routing`` it is the identity of the
    weights. ``companions(directory, config)`` writes the files beside the data. Memory: two records a thread, up to
    ``_RECORDS_BYTES``, and a few MiB of dense chunks.
    """
    # As a conversion of the same model would have it: quantised weights count as BF16.
    config = {**weights.config, "dtype": "bfloat16"} if weights.dtype == "q4_0" else weights.config
    plan = plan_index(
        config,
        {name: weights.dtype_of(name) for name in weights.shapes},
        [weights.dtype] * len(weights.spec.moe_layers),
        max_file_bytes=max_file_bytes,
        path=destination,
    )
    fingerprint = digest_json({key: value for key, value in source.items() if key != "routing"})
    with FtwWriter(destination, plan, fingerprint, overwrite=overwrite) as writer:
        counter = Counter(progress, plan.dense_bytes + plan.expert_bytes, writer.resumed_bytes)
        with ThreadPoolExecutor(num_threads, "synth") as pool:
            for name in plan.tensors:
                if not writer.has_tensor(name):
                    make = functools.partial(_chunk, weights, name)
                    chunks = ordered_map(pool, make, weights.chunks(name), _CHUNKS_AHEAD * num_threads)
                    writer.write_tensor(name, _counted(chunks, counter, name))

        def write_run(run: _Run) -> None:
            record: NDArray[np.uint8] | None = None
            for layer, expert in run:
                layout = plan.layout_of(layer)
                if record is None or record.nbytes != layout.stride_bytes:
                    record = np.zeros(layout.stride_bytes, np.uint8)
                _make_record(weights, layout, layer, expert, record)
                writer.write_record(layer, expert, record)
                counter.add(layout.stride_bytes, f"layer {plan.spec.moe_layers[layer]} expert {expert}")

        largest = max((layout.stride_bytes for layout in plan.layouts), default=1)
        at_once = max(1, _RECORDS_BYTES // (2 * largest))  # a record, and the matrices it is made of
        for_each(write_run, _runs(plan, writer), min(num_threads, at_once))
        return writer.finish({**source, "fingerprint": fingerprint}, lambda directory: companions(directory, config))


def _chunk(weights: SyntheticWeights, name: str, rows: tuple[int, int]) -> Stored:
    return weights.rows(name, *rows)


def _counted(chunks: Iterator[Stored], counter: Counter, name: str) -> Iterator[Stored]:
    for chunk in chunks:
        yield chunk
        counter.add(chunk.nbytes, name)


def _make_record(
    weights: SyntheticWeights, layout: RecordLayout, layer: int, expert: int, out: NDArray[np.uint8]
) -> None:
    gate, up, down = (weights.expert(layer, expert, part) for part in PARTS)
    pack = pack_q4_0_expert if weights.dtype == "q4_0" else pack_expert
    pack(layout, gate, up, down, out)


def _runs(plan: FtwIndex, writer: FtwWriter) -> list[_Run]:
    """What is left to do, by data file."""
    by_file: dict[int, list[tuple[int, int]]] = {}
    for layer, expert in np.ndindex(*plan.record_file.shape):
        if not writer.has_record(layer, expert):
            by_file.setdefault(int(plan.record_file[layer, expert]), []).append((layer, expert))
    return list(by_file.values())
