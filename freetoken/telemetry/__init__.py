"""Logging set-up and figures, shared by all processes."""

from freetoken.telemetry.logs import setup_logging
from freetoken.telemetry.means import Ewma

__all__ = ["Ewma", "setup_logging"]
