"""How errors are told on the command line."""

from __future__ import annotations

from rich.console import Console

from freetoken.errors import CapacityError, ConfigError, FreeTokenError

FAILED = 1
WRONG_SETTINGS = 2


def report(error: FreeTokenError) -> int:
    """Print ``error`` in one line, without a traceback; returns the exit status that fits it."""
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    Console(stderr=True).print(f"error: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
    return WRONG_SETTINGS if isinstance(error, (ConfigError, CapacityError)) else FAILED
