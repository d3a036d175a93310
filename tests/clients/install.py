"""Installing clients from their package registry into a cache outside the repository.

``FREETOKEN_CLIENTS_DIR`` is the cache (default: a folder of the user's in the system's temporary directory).
``FREETOKEN_INSTALL_CLIENTS=0`` forbids to download: then only what is in the cache is used. A test that needs a client
which cannot be had is skipped, and says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

INSTALL_TIMEOUT_S = 300


def cache_dir() -> Path:
    """Where clients are installed."""
    given = os.environ.get("FREETOKEN_CLIENTS_DIR")
    return Path(given) if given else Path(tempfile.gettempdir()) / f"freetoken-clients-{os.getuid()}"


def npm_package(name: str, version: str) -> Path:
    """The ``node_modules`` folder with this package in it. Skips the test when it cannot be installed."""
    target = cache_dir() / f"{name.replace('/', '_')}-{version}"
    modules = target / "node_modules"
    if modules.is_dir():
        return modules
    if os.environ.get("FREETOKEN_INSTALL_CLIENTS") == "0":
        pytest.skip(f"{name} {version} is not in {cache_dir()}, and FREETOKEN_INSTALL_CLIENTS=0 forbids to install it")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"installing {name} needs npm on PATH")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [
            npm,
            "install",
            "--no-fund",
            "--no-audit",
            "--ignore-scripts",
            "--prefix",
            scratch,
            f"{name}@{version}",
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm took more than {INSTALL_TIMEOUT_S} s to install {name} {version}")
        if done.returncode != 0:
            pytest.skip(f"npm cannot install {name} {version}: {done.stderr.strip()[-500:]}")
        try:
            Path(scratch).rename(target)
        except OSError:  # another test run was faster
            if not modules.is_dir():
                raise
        Path(scratch).mkdir(exist_ok=True)
    return modules
