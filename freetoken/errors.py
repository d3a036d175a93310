"""Exceptions that cross module and actor boundaries.

Every class survives pickling with all its fields: constructor arguments are positional and stored unchanged.
"""

from __future__ import annotations


class FreeTokenError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(FreeTokenError):
    """A setting is wrong. The message names the key, the value and what would work."""


class CheckpointError(FreeTokenError):
    """A checkpoint is missing, truncated, corrupt or of a foreign kind. The message names file and record/tensor."""


class UnsupportedModelError(FreeTokenError):
    """The checkpoint is sound but describes a model or a format this version cannot run."""


class CapacityError(FreeTokenError):
    """The plan does not fit the machine. The message names the flag and the value that would work."""


class PeerLostError(FreeTokenError):
    """A peer actor is gone; whatever was asked of it will not be answered."""

    def __init__(self, peer: str, detail: str = "") -> None:
        super().__init__(peer, detail)
        self.peer = peer
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.peer} is gone" + (f": {self.detail}" if self.detail else "")


class StepAbortedError(FreeTokenError):
    """The running step was abandoned (a data-plane word was late or the epoch changed)."""


class TraceBusyError(FreeTokenError):
    """Routes cannot be recorded now: a recording is under way, or there is no space for one."""


class RebalanceBusyError(FreeTokenError):
    """Memory cannot be moved now: a change is under way, or the engine does not serve. Try again."""
