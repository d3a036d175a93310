"""One run of an agent's program that tells what it does as lines of JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RUN_TIMEOUT_S = 120


async def run_program(
    program: Path, arguments: list[str], directory: Path, environment: Mapping[str, str]
) -> tuple[int, list[dict[str, Any]], str]:
    """(exit status, the JSON lines of standard output, standard error). Kills the program when it takes too long."""
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        cwd=directory,
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), RUN_TIMEOUT_S)
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    events = [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]
    return process.returncode or 0, events, err.decode(errors="replace")
