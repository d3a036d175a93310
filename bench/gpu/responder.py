"""Answers publishes from a thread in C: looks experts up in a table of slots and writes plans, as ExpertCache does.

Stands in for the real servers, so that the device's side can be measured alone. Compiled with the system's C compiler.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from freetoken.kernels.triton.mailbox import MailboxAddresses

_SOURCE = r"""
#include <pthread.h>
#include <stdint.h>
#include <string.h>

typedef struct {
  int32_t expert, kind, source_slot, destination_slot, first_route, num_routes, reserved[2];
} Entry;
typedef struct {
  volatile uint32_t *req, *plan, *part;
  const uint32_t* request;
  const int32_t* ids;
  uint32_t* header;
  Entry* entries;
  int32_t* routes;
  const int32_t* slot_of;  /* [layers][experts], -1: fetch */
  int32_t num_experts, cpu_share;
  volatile int32_t stop;
  uint32_t last;  /* the number of the latest publish that has been seen */
  volatile int64_t answered;
} Job;

static void answer(Job* j, uint32_t seq) {
  static int32_t use_of[4096], counts[4096], experts[4096];
  const int32_t layer = (int32_t)j->request[1], tokens = (int32_t)j->request[4], k = (int32_t)j->request[5];
  const int32_t n = tokens * k;
  const int32_t* slots = j->slot_of + (int64_t)layer * j->num_experts;
  int32_t uses = 0, hits = 0, routes = 0;
  for (int32_t r = 0; r < n; ++r) {
    const int32_t e = j->ids[r];
    if (e < 0) continue;
    if (use_of[e] == 0) {
      use_of[e] = ++uses;
      experts[uses] = e;
      counts[uses] = 0;
      hits += slots[e] >= 0;
    }
    ++counts[use_of[e]];
    ++routes;
  }
  int32_t hit = 0, miss = hits, first = 0;
  for (int32_t pass = 0; pass < 2; ++pass)
    for (int32_t u = 1; u <= uses; ++u) {
      const int32_t e = experts[u], slot = slots[e];
      if ((slot >= 0) != (pass == 0)) continue;
      Entry* entry = &j->entries[pass == 0 ? hit++ : miss++];
      entry->expert = e;
      entry->kind = slot >= 0 ? 0 : 1;
      entry->source_slot = slot;
      entry->destination_slot = -1;
      entry->first_route = first;
      entry->num_routes = counts[u];
      entry->reserved[0] = entry->reserved[1] = 0;
      first += counts[u];
      counts[u] = entry->first_route;
    }
  for (int32_t r = 0; r < n; ++r)
    if (j->ids[r] >= 0) j->routes[counts[use_of[j->ids[r]]]++] = r;
  for (int32_t u = 1; u <= uses; ++u) use_of[experts[u]] = 0;
  j->header[0] = seq;
  j->header[1] = (uint32_t)hits;
  j->header[2] = (uint32_t)(uses - hits);
  j->header[3] = (uint32_t)j->cpu_share;
  j->header[4] = (uint32_t)routes;
  j->header[5] = j->header[6] = 0;
}

static void* serve(void* argument) {
  Job* j = (Job*)argument;
  while (!j->stop) {
    const uint32_t seq = __atomic_load_n(j->req, __ATOMIC_ACQUIRE);
    if (seq == j->last) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      continue;
    }
    j->last = seq;
    answer(j, seq);
    __atomic_store_n(j->plan, seq, __ATOMIC_RELEASE);
    if (j->cpu_share) __atomic_store_n(j->part, seq, __ATOMIC_RELEASE);
    ++j->answered;
  }
  return 0;
}

int start(Job* job, pthread_t* thread) {
  job->last = *job->req;
  return pthread_create(thread, 0, serve, job);
}
int finish(Job* job, pthread_t* thread) { job->stop = 1; return pthread_join(*thread, 0); }
"""

_REGIONS = {
    "req": 256, "plan": 256, "part": 256, "abort": 256, "request": 256, "hidden": 0, "ids": 0, "weights": 0, "admit": 0,
    "plan_header": 256, "entries": 0, "routes": 0, "partial": 0,
}  # fmt: skip


class _Job(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("req", "plan", "part", "request", "ids", "header", "entries", "routes")),
        ("slot_of", ctypes.c_void_p),
        ("num_experts", ctypes.c_int32),
        ("cpu_share", ctypes.c_int32),
        ("stop", ctypes.c_int32),
        ("last", ctypes.c_uint32),
        ("answered", ctypes.c_int64),
    ]


class Responder:
    """A mailbox in pinned memory for up to ``tokens`` tokens, and the thread that serves it between ``start`` and
    ``stop``.

    ``slot_of`` int32 [layers, experts] on the host: the slot of each record, or -1.
    """

    def __init__(self, tokens: int, top_k: int, hidden: int, slot_of: torch.Tensor, cpu_share: bool = False) -> None:
        routes = tokens * top_k
        sizes = dict(_REGIONS)
        sizes["hidden"], sizes["ids"], sizes["weights"] = tokens * hidden * 4, routes * 4, routes * 4
        sizes["admit"], sizes["entries"], sizes["routes"] = tokens, routes * 32, routes * 4
        sizes["partial"] = tokens * hidden * 4
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += -(-size // 256) * 256
        self.memory = torch.zeros(end, dtype=torch.uint8, pin_memory=True)
        self.addresses = MailboxAddresses(**{name: self.memory.data_ptr() + o for name, o in offsets.items()})
        self._slot_of = slot_of.contiguous()
        a = self.addresses
        self._job = _Job(
            a.req, a.plan, a.part, a.request, a.ids, a.plan_header, a.entries, a.routes, self._slot_of.data_ptr(),
            slot_of.shape[1], int(cpu_share), 0, 0, 0,
        )  # fmt: skip
        self._thread = (ctypes.c_uint64 * 2)()
        self._library = _build()

    def start(self) -> None:
        """Serve from now on."""
        self._job.stop = 0
        if self._library.start(ctypes.byref(self._job), ctypes.byref(self._thread)):
            raise RuntimeError("the responder's thread could not be started")

    def stop(self) -> None:
        """Join the thread."""
        self._library.finish(ctypes.byref(self._job), ctypes.byref(self._thread))

    @property
    def answered(self) -> int:
        """Plans written so far."""
        return int(self._job.answered)


_library: ctypes.CDLL | None = None


def _build() -> ctypes.CDLL:
    global _library
    if _library is None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
        if compiler is None:
            raise RuntimeError("no C compiler found")
        directory = Path(tempfile.mkdtemp(prefix="responder"))
        source, target = directory / "responder.c", directory / "responder.so"
        source.write_text(_SOURCE)
        subprocess.run(
            [compiler, "-x", "c", "-O2", "-shared", "-fPIC", "-pthread", str(source), "-o", str(target)], check=True
        )  # fmt: skip
        _library = ctypes.CDLL(str(target))
    return _library
