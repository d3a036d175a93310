"""The boot plan of a model that need not be there: a checkpoint's headers, or the dimensions of a known model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freetoken.checkpoint.convert import ConvertOptions, open_source, plan_conversion
from freetoken.checkpoint.ftw import INDEX_NAME, FtwIndex
from freetoken.checkpoint.ftw_writer import plan_index
from freetoken.checkpoint.resolve import DEMO_EXPERTS, DEMO_NAME, find_demo_gguf
from freetoken.checkpoint.split_experts import SplitExpertsSource
from freetoken.checkpoint.synthetic.shapes import SHAPES, shape_config
from freetoken.checkpoint.synthetic.weights import SyntheticWeights
from freetoken.config.loader import load_config, merge
from freetoken.costs import CostModel, assumed_costs
from freetoken.elastic.boot_plan import CheckpointSizes, plan_boot
from freetoken.elastic.boot_report import BootReport, report_boot
from freetoken.elastic.machine import MachineInfo, read_machine
from freetoken.elastic.profile import identify, load_profile
from freetoken.engine.prepare import check_config
from freetoken.errors import CheckpointError
from freetoken.launch_spec import LaunchSpec


def read_index(model: str, dtype: str | None = None) -> FtwIndex:
    """What ``freetoken launch`` would load, from headers alone: an FTW directory's index, or the plan of converting a
    Hugging Face directory or GGUF file, or of a model of ``freetoken synth`` by its name in ``dtype`` (BF16 unless
    given). Nothing is downloaded, converted or written. Raises ``CheckpointError`` or ``UnsupportedModelError``."""
    path = Path(model).expanduser()
    if not path.exists():
        if model == DEMO_NAME:
            opened = SplitExpertsSource(open_source(find_demo_gguf()), DEMO_EXPERTS)
            try:
                return plan_conversion(opened, ConvertOptions(split_dense_into_experts=DEMO_EXPERTS))
            finally:
                opened.close()
        if model not in SHAPES:
            raise CheckpointError(
                f"model {model!r}: no such file or directory, and none of the known shapes ({', '.join(SHAPES)})"
            )
        weights = SyntheticWeights(shape_config(model), dtype or "bf16")
        config = {**weights.config, "dtype": "bfloat16"} if weights.dtype == "q4_0" else weights.config
        dense = {name: weights.dtype_of(name) for name in weights.shapes}
        return plan_index(config, dense, [weights.dtype] * len(weights.spec.moe_layers))
    if dtype is not None:
        raise CheckpointError(f"--dtype {dtype} is for models by name; {model} has the dtype of its weights")
    if (path / INDEX_NAME).exists():
        return FtwIndex.load(path)
    source = open_source(path)
    try:
        return plan_conversion(source)
    finally:
        source.close()


def plan_model(
    model: str,
    *,
    dtype: str | None = None,
    profile: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    machine: MachineInfo | None = None,
) -> BootReport:
    """The report for ``model`` under these settings, on this machine. Raises what ``prepare_launch`` does."""
    config = load_config(profile=profile, flags=merge({"model": model}, overrides or {}))
    check_config(config)
    index = read_index(model, dtype)
    machine = machine or read_machine(config.device)
    sizes = CheckpointSizes(index.dense_bytes, index.expert_bytes)
    plan = plan_boot(config, index.spec, index.layouts, sizes, machine)
    costs: CostModel | None = None
    if index.spec.is_moe and plan.budget_bytes is not None:
        identity = identify(config, plan, index.layouts, index.spec.num_experts_per_tok)
        kept = load_profile(identity, config.loader.cache_dir) if identity is not None else None
        costs = kept.costs if kept is not None else None
    return report_boot(config, index.spec, index.layouts, sizes, machine, costs or assumed_costs(config.device))


def report_launch(spec: LaunchSpec, machine: MachineInfo | None = None) -> BootReport:
    """The report for a launch that is planned already."""
    index = FtwIndex.load(Path(spec.checkpoint))
    return report_boot(
        spec.config,
        spec.model,
        spec.layouts,
        CheckpointSizes(index.dense_bytes, index.expert_bytes),
        machine or read_machine(spec.config.device),
        spec.plan.costs or assumed_costs(spec.config.device),
        spec.plan,
    )
