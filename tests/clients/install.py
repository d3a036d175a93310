"""Installing clients from their package registry into a cache outside the repository.

``FREETOKEN_CLIENTS_DIR`` is the cache (default: a folder of the user's in the system's temporary directory).
Unless ``FREETOKEN_INSTALL_CLIENTS`` is set, nothing is downloaded: what is in the cache is used. ``1`` allows to
download (some hundred MB for each client), ``all`` runs clients that take long as well. A test that needs a client
which is not there is skipped, and says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

INSTALL_TIMEOUT_S = 300


def cache_dir() -> Path:
    """Where clients are installed."""
    given = os.environ.get("FREETOKEN_CLIENTS_DIR")
    return Path(given) if given else Path(tempfile.gettempdir()) / f"freetoken-clients-{os.getuid()}"


def npm_package(name: str, version: str) -> Path:
    """The ``node_modules`` folder with this package in it. Skips the test when it cannot be installed."""
    npm = shutil.which("npm")
    command = [npm or "npm", "install", "--no-fund", "--no-audit", "--ignore-scripts"]
    return _installed(name, version, [*command, "--prefix", "SCRATCH", f"{name}@{version}"]) / "node_modules"


def pypi_wheel(name: str, version: str) -> Path:
    """A folder with the files of a wheel, without what it depends on. Skips the test when it cannot be had."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    return _installed(name, version, [*command, "--dest", "SCRATCH", f"{name}=={version}"], unpack=True)


def _installed(name: str, version: str, command: list[str], unpack: bool = False) -> Path:
    target = cache_dir() / f"{name.replace('/', '_')}-{version}"
    if target.is_dir():
        return target
    if os.environ.get("FREETOKEN_INSTALL_CLIENTS", "0") in ("", "0"):
        pytest.skip(f"{name} {version} is not in {cache_dir()}; FREETOKEN_INSTALL_CLIENTS=1 downloads it")
    if shutil.which(command[0]) is None:
        pytest.skip(f"installing {name} needs {command[0]} on PATH")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [scratch if word == "SCRATCH" else word for word in command]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"installing {name} {version} took more than {INSTALL_TIMEOUT_S} s")
        if done.returncode != 0:
            pytest.skip(f"{name} {version} cannot be installed: {done.stderr.strip()[-500:]}")
        for wheel in Path(scratch).glob("*.whl") if unpack else ():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch)
            wheel.unlink()
        try:
            Path(scratch).rename(target)
        except OSError:  # another test run was faster
            if not target.is_dir():
                raise
        Path(scratch).mkdir(exist_ok=True)
    return target
