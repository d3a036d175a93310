"""What every actor process is told besides its LaunchSpec."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from freetoken.engine.build import SERVICES, ServiceTable
from freetoken.engine.members import SupervisionPolicy


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, told apart from a later one with the same number by its start time (clock ticks since boot)."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """One engine's place in its cluster. ``launcher`` is watched by the Controller (None: detached); ``python`` is set
    when the cluster's own interpreter is another one; ``policy`` and ``services`` differ from the default in tests."""

    namespace: str
    node_id: str
    transport: str = "socket"
    launcher: ProcessId | None = None
    python: str | None = None
    services: ServiceTable = field(default_factory=lambda: dict(SERVICES))
    policy: SupervisionPolicy | None = None
    log_level: str = ""

    def runtime_env(self) -> dict[str, Any] | None:
        """Ray's runtime environment; None where prestarted workers will do."""
        return None if self.python is None else {"py_executable": self.python}
