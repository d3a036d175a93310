"""Words and stamps between kernels and the host, and a gate between the programs of one kernel.

A word is 32 bits with one writer (see csrc/core/mailbox.h); ``word``, ``abort`` and ``stamps`` are addresses that the
device can read and write. In the interpreter nothing waits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton.common import pointer_to

ABORT_PLAN_LATE = 3
ABORT_PARTIAL_LATE = 4
# Stages of a layer: indices of the int64 stamps that the client writes, nanoseconds of the GPU's global timer.
# The publish's number stands behind them.
STAMP_PUBLISHED, STAMP_PLANNED, STAMP_OWN, STAMP_PART, STAMP_SEQ = range(5)


_RELEASE = """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first fence.acq_rel.SCOPE;
            @first st.relaxed.SCOPE.global.u32 [$1], $2;
            mov.u32 $0, 0;
            }"""
RELEASE_SYSTEM = tl.constexpr(_RELEASE.replace("SCOPE", "sys"))
RELEASE_DEVICE = tl.constexpr(_RELEASE.replace("SCOPE", "gpu"))


@triton.jit
def _release(address, value, ASSEMBLY: tl.constexpr, INTERPRET: tl.constexpr):
    # One thread stores, after all threads have come so far.
    tl.debug_barrier()
    if INTERPRET:
        tl.store(pointer_to(address, tl.int32), value)
    else:
        tl.inline_asm_elementwise(
            ASSEMBLY, "=r,l,r", [address.to(tl.int64), value], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def store_release_system(address, value, INTERPRET: tl.constexpr):
    """One thread stores the 32-bit value; whoever sees it sees all that this program wrote before."""
    _release(address, value, RELEASE_SYSTEM, INTERPRET)


@triton.jit
def stamp(stamps, STAGE: tl.constexpr, INTERPRET: tl.constexpr):
    """Note when this stage of the layer was reached, if ``stamps`` is not 0."""
    if stamps != 0:
        if INTERPRET:
            now = 1 + STAGE
        else:
            now = tl.inline_asm_elementwise(
                "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
            )
        tl.store(pointer_to(stamps, tl.int64) + STAGE, now)


@triton.jit
def wait_word(word, abort, expected, limit_ns, INTERPRET: tl.constexpr):
    """Poll the word at address ``word``; 0 when it is ``expected``, 1 when ``abort`` is raised, 2 after ``limit_ns``.

    One thread polls: every poll is a read of the very line that the host is about to write, and reads by many warps
    queue up before that write. Both words are read at once, so that a round costs one trip over the bus.
    """
    if INTERPRET:
        return tl.where(tl.load(pointer_to(word, tl.int32)) == expected, 0, 1)
    else:
        status = tl.inline_asm_elementwise(
            """{
            .reg .pred other, done, stop, late;
            .reg .u32 thread, value, reason;
            .reg .u64 start, now;
            mov.u32 $0, 0;
            mov.u32 thread, %tid.x;
            setp.ne.u32 other, thread, 0;
            @other bra OVER;
            mov.u64 start, %globaltimer;
            POLL:
            ld.relaxed.sys.global.u32 value, [$1];
            ld.relaxed.sys.global.u32 reason, [$2];
            setp.eq.u32 done, value, $3;
            @done bra SEEN;
            setp.ne.u32 stop, reason, 0;
            @stop bra STOPPED;
            mov.u64 now, %globaltimer;
            sub.u64 now, now, start;
            setp.lt.u64 late, now, $4;
            @late bra POLL;
            mov.u32 $0, 2;
            bra SEEN;
            STOPPED:
            mov.u32 $0, 1;
            SEEN:
            fence.acq_rel.sys;
            OVER:
            }""",
            "=&r,l,l,r,l",
            [word.to(tl.int64), abort.to(tl.int64), expected, limit_ns.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()
        # The reduction goes through all warps (up to 8) and gives each what the first one saw.
        return tl.max(tl.zeros([256], tl.int32) + status, axis=0)


@triton.jit
def open_gate(gate_ptr, value, INTERPRET: tl.constexpr):
    """Let the other programs of this kernel pass ``await_gate``; they see all that this program saw or wrote before."""
    _release(gate_ptr.to(tl.int64), value, RELEASE_DEVICE, INTERPRET)


@triton.jit
def await_gate(gate_ptr, value, INTERPRET: tl.constexpr):
    """Wait until another program of this kernel has opened the gate. There is no time limit: that program has one."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            """{
            .reg .pred other, shut;
            .reg .u32 thread, value;
            mov.u32 $0, 0;
            mov.u32 thread, %tid.x;
            setp.ne.u32 other, thread, 0;
            @other bra PASSED;
            KNOCK:
            ld.relaxed.gpu.global.u32 value, [$1];
            setp.ne.u32 shut, value, $2;
            @shut bra KNOCK;
            fence.acq_rel.gpu;
            PASSED:
            }""",
            "=&r,l,r",
            [gate_ptr.to(tl.int64), value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()


@triton.jit
def wait_pieces(pieces, abort, expected, limit_ns, COUNT: tl.constexpr, PIECES: tl.constexpr, INTERPRET: tl.constexpr):
    """Poll the first COUNT of PIECES pieces of 16 bytes until each carries the number ``expected`` in its first word.

    Returns four int32 [PIECES]: a status as of ``wait_word``, and the other words. The host writes a piece's first word
    last, and a piece is read at once. For programs of one warp, PIECES = 32.
    """
    piece = tl.arange(0, PIECES)
    address = pieces.to(tl.int64) + piece.to(tl.int64) * 16
    wanted = (piece < COUNT).to(tl.int32)
    if INTERPRET:
        word = pointer_to(pieces, tl.int32) + piece * 4
        state = ((wanted != 0) & (tl.load(word) != expected)).to(tl.int32)
        return state, tl.load(word + 1), tl.load(word + 2), tl.load(word + 3)
    else:
        state, first, second, third = tl.inline_asm_elementwise(
            """{
            .reg .pred none, done, stop, late;
            .reg .u32 value, reason;
            .reg .u64 start, now;
            mov.u32 $0, 0;
            mov.u32 $1, 0;
            mov.u32 $2, 0;
            mov.u32 $3, 0;
            setp.eq.u32 none, $8, 0;
            @none bra OVER;
            mov.u64 start, %globaltimer;
            POLL:
            ld.relaxed.sys.global.u32 reason, [$5];
            ld.volatile.global.v4.u32 {value, $1, $2, $3}, [$4];
            setp.eq.u32 done, value, $6;
            @done bra OVER;
            setp.ne.u32 stop, reason, 0;
            @stop bra STOPPED;
            mov.u64 now, %globaltimer;
            sub.u64 now, now, start;
            setp.lt.u64 late, now, $7;
            @late bra POLL;
            mov.u32 $0, 2;
            bra OVER;
            STOPPED:
            mov.u32 $0, 1;
            OVER:
            }""",
            "=&r,=&r,=&r,=&r,l,l,r,l,r",
            [
                address,
                abort.to(tl.int64) + 0 * address,
                expected + 0 * wanted,
                limit_ns.to(tl.int64) + 0 * address,
                wanted,
            ],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
        return state, first, second, third
