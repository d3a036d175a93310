"""From a command line to a LaunchSpec: settings, checkpoint, boot plan. Nothing is loaded or started here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.resolve import resolve_checkpoint
from freetoken.config import EngineConfig
from freetoken.config.loader import load_config, merge
from freetoken.elastic.boot_plan import LEAST_BATCH_TOKENS, CheckpointSizes, plan_boot
from freetoken.elastic.machine import MachineInfo, read_machine
from freetoken.errors import ConfigError
from freetoken.launch_spec import LaunchSpec

Progress = Callable[[int, int, str], None]
"""``progress(done, total, what)``: bytes while a checkpoint is being converted."""


def prepare_launch(
    model: str,
    *,
    profile: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    machine: MachineInfo | None = None,
    progress: Progress | None = None,
) -> LaunchSpec:
    """Resolve settings, find or convert the checkpoint, and plan memory and cores.

    ``overrides`` are nested settings from flags. Raises ``ConfigError``, ``CheckpointError``, ``UnsupportedModelError``
    or ``CapacityError``, each with a message for the user; all before any weight is read.
    """
    config = load_config(profile=profile, flags=merge({"model": model}, overrides or {}), environment=environment)
    check_config(config)
    checkpoint = resolve_checkpoint(config.model, config.loader.cache_dir, progress)
    return plan_launch(config, checkpoint, machine or read_machine(config.device))


def check_config(config: EngineConfig) -> None:
    """Refuse combinations of settings that cannot work together; ``ConfigError`` names both."""
    if config.deterministic and config.device != "cpu":
        raise ConfigError(f"deterministic=true needs device=cpu (got device={config.device})")
    scheduler = config.scheduler
    batched = scheduler.max_num_batched_tokens or LEAST_BATCH_TOKENS
    if scheduler.max_num_running > batched:
        raise ConfigError(
            f"scheduler.max_num_running={scheduler.max_num_running} is above "
            f"scheduler.max_num_batched_tokens={batched}: one step could not hold all of them"
        )
    if scheduler.prefill_chunk_tokens > batched:
        raise ConfigError(
            f"scheduler.prefill_chunk_tokens={scheduler.prefill_chunk_tokens} is above "
            f"scheduler.max_num_batched_tokens={batched}"
        )


def plan_launch(config: EngineConfig, checkpoint: Path, machine: MachineInfo) -> LaunchSpec:
    """The LaunchSpec for a converted checkpoint on ``machine``."""
    index = FtwIndex.load(checkpoint)
    plan = plan_boot(config, index.spec, index.layouts, CheckpointSizes(index.dense_bytes, index.expert_bytes), machine)
    return LaunchSpec(
        config=config,
        model=index.spec,
        plan=plan,
        checkpoint=str(checkpoint),
        fingerprint=index.fingerprint,
        served_model_name=config.served_model_name or _base_name(config.model),
        layouts=index.layouts,
        layer_layout=index.layer_layout,
    )


def _base_name(model: str) -> str:
    """Of a directory or hub name, or of a GGUF file without its suffix."""
    path = Path(model)
    return (path.stem if path.suffix.lower() == ".gguf" else path.name) or model
