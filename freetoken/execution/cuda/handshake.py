"""Whether GPU and CPU see each other's writes to the mailbox while a kernel runs: decode rests on it, and a machine on
which it fails (some virtual machines) would otherwise hang in its first step."""

from __future__ import annotations

import threading
import time

import numpy as np
import torch

from freetoken._native import Mailbox
from freetoken.errors import FreeTokenError
from freetoken.execution.cuda.data_plane import DataPlane

LIMIT_S = 5.0
"""Of each direction. It takes microseconds where it works; the first kernel launch may take longer."""


def check_handshake(plane: DataPlane, mailbox: Mailbox, limit_s: float = LIMIT_S) -> None:
    """Publish on the device, see it on the host, answer there, and wait for the answer in a kernel, twice: with a wait
    that was launched before the answer, as in every step. ``mailbox``, whom nobody serves, is attached to ``plane``;
    the device is idle, and the calling context is that of the steps' stream.

    Raises ``FreeTokenError`` that says which direction does not work.
    """
    layout = mailbox.layout()
    words = np.frombuffer(memoryview(mailbox.segment), np.uint32)
    req, part = layout["req_offset"] // 4, layout["part_offset"] // 4
    for _ in range(2):
        wanted = (int(plane.seq) + 1) & 0xFFFFFFFF
        seen = threading.Event()

        def answer(wanted: int = wanted, seen: threading.Event = seen) -> None:
            end = time.monotonic() + limit_s
            while words[req] != wanted:
                if time.monotonic() > end:
                    return
                time.sleep(20e-6)
            seen.set()
            words[part] = wanted

        responder = threading.Thread(target=answer, name="ft-handshake", daemon=True)
        responder.start()
        status = plane.exchange(limit_s, responder.join)
        responder.join()
        if not seen.is_set():
            raise FreeTokenError(
                f"the CPU did not see what the GPU wrote to registered host memory within {limit_s:g} s; decoding with "
                "experts in host memory needs that. Is this a virtual machine without host-visible GPU writes? "
                "--device cpu works without"
            )
        if status != 0:
            raise FreeTokenError(
                f"a running GPU kernel did not see what the CPU wrote to registered host memory within {limit_s:g} s; "
                "decoding with experts in host memory needs that. --device cpu works without"
            )


def settle(plane: DataPlane) -> None:
    """After the check: nothing of it is left in the plane."""
    plane.counts.zero_()
    if plane.counts.device.type == "cuda":
        torch.cuda.synchronize(plane.counts.device)
