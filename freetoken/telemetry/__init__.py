"""Logging set-up shared by all processes."""

from freetoken.telemetry.logs import setup_logging

__all__ = ["setup_logging"]
