"""Standard-library logging, one line an event: ``time level actor logger message key=value``.

The level comes from ``FREETOKEN_LOG`` (``debug``, ``info``, ``warning``, ``error``; default ``info``).
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

ENVIRONMENT_VARIABLE = "FREETOKEN_LOG"


def setup_logging(actor: str, stream: TextIO | None = None) -> None:
    """Give the ``freetoken`` and ``actors`` loggers one handler. Idempotent; the root logger is left alone."""
    level = getattr(logging, os.environ.get(ENVIRONMENT_VARIABLE, "info").upper(), logging.INFO)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {actor} %(name)s %(message)s"))
    for name in ("freetoken", "actors"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
