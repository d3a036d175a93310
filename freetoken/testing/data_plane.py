"""ExpertCache's and CpuExecutor's native servers in processes of their own, without services and transport.

``ServerProcess`` starts one; the child (``python -m freetoken.testing.data_plane``) inherits the descriptors, says when
it serves, and stops when its input ends: it never outlives its parent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from freetoken._native import CacheServer, CpuServer, Mailbox, SharedSegment, SlotTable, WorkerPool
from freetoken.testing.expert_bank import ExpertBank, as_settings


class ServerProcess:
    """Role ``cache`` (settings: num_slots, fetch_fraction) or ``cpu`` (settings: threads)."""

    def __init__(
        self, role: str, mailbox: SharedSegment, bank: ExpertBank, *, spin_us: int = 0, core: int = -1, **settings: Any
    ) -> None:
        """``core`` pins the whole process to one CPU. Returns once it serves."""
        fds = (mailbox.fd, bank.segment.fd)
        arguments = {
            "role": role,
            "mailbox": [mailbox.fd, mailbox.size_bytes],
            "store": [bank.segment.fd, bank.segment.size_bytes],
            "bank": as_settings(bank),
            "spin_us": spin_us,
            "core": core,
            **settings,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "freetoken.testing.data_plane", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != b"serving\n":
            self.kill()
            raise RuntimeError(f"the {role} server did not start")

    def stop(self) -> dict[str, int]:
        """End it in order; returns the server's counters."""
        output, _ = self.process.communicate()
        counters: dict[str, int] = json.loads(output)
        return counters

    def kill(self) -> None:
        """End it as a crash would; idempotent."""
        self.process.kill()
        self.process.communicate()


def _serve(arguments: dict[str, Any]) -> None:
    if arguments["core"] >= 0:
        os.sched_setaffinity(0, {arguments["core"]})
    mailbox_fd, mailbox_bytes = arguments["mailbox"]
    store_fd, store_bytes = arguments["store"]
    mailbox = Mailbox.attach(SharedSegment.attach(mailbox_fd, mailbox_bytes))
    bank = ExpertBank(**arguments["bank"], segment=SharedSegment.attach(store_fd, store_bytes))
    server: CacheServer | CpuServer
    if arguments["role"] == "cache":
        slots = SlotTable(bank.num_layers, bank.num_experts, arguments["num_slots"])
        server = CacheServer(
            mailbox,
            slots,
            arguments["fetch_fraction"],
            arguments.get("in_place", False),
            arguments["spin_us"],
            [bank.layout.stride_bytes] * bank.num_layers,
        )
    else:
        server = CpuServer(mailbox, bank.store, WorkerPool(arguments["threads"]), arguments["spin_us"])
    server.start()
    print("serving", flush=True)
    sys.stdin.read()
    server.stop()
    print(json.dumps(server.counters()), flush=True)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
