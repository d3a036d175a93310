"""``python -m freetoken.testing.scripted_launch launch MODEL``: ``freetoken launch`` with a scripted model."""

from __future__ import annotations

import sys

from freetoken.cli import launch
from freetoken.cli.main import build_parser
from freetoken.testing.scripted_model import SCRIPTED_SERVICES

if __name__ == "__main__":
    sys.exit(launch.run(build_parser(only="launch").parse_args(), SCRIPTED_SERVICES))
