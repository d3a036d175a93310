"""A dense Llama-shaped model as a Mixtral-shaped one with the same function.

The intermediate neurons of each MLP are cut into E runs; each run is an expert. With router weights of zero every
expert is chosen (K = E) with weight 1/E, so multiplying the down projections by E gives back the dense sum. E is a
power of two, which makes both factors exact: only the order of additions differs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.source import SourceTensor, TensorSource, parse_source_config
from freetoken.errors import CheckpointError, UnsupportedModelError
from freetoken.quant import bf16

_MLP = re.compile(r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight")
_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
_DENSE_ONLY_KEYS = ("attention_bias", "mlp_bias", "pretraining_tp", "model_type", "architectures")


class SplitExpertsSource(TensorSource):
    """``inner`` with its MLPs as ``num_experts`` experts a layer. Owns and closes ``inner``.

    Quantised MLPs come as the float32 values that they stand for: an expert's scales times E may leave their format.
    """

    def __init__(self, inner: TensorSource, num_experts: int) -> None:
        spec = parse_source_config(inner.config)
        if spec.family != "llama" or spec.attention_bias or spec.mlp_bias:
            raise UnsupportedModelError(
                f"{spec.architecture} cannot be split into experts: a dense Llama or Mistral without biases is needed"
            )
        if num_experts < 2 or num_experts & (num_experts - 1):
            raise CheckpointError(f"cannot split into {num_experts} experts: the number must be a power of two above 1")
        if spec.intermediate_size % num_experts:
            raise CheckpointError(
                f"cannot split into {num_experts} experts: it does not divide the intermediate size "
                f"{spec.intermediate_size}"
            )
        self._inner = inner
        self._num_experts = num_experts
        self._columns = spec.intermediate_size // num_experts
        self._last: tuple[str, NDArray[Any]] | None = None
        self.description = {**inner.description, "split_dense_into_experts": num_experts}
        self.fingerprint = f"{inner.fingerprint}+experts{num_experts}"
        self.config = {k: v for k, v in inner.config.items() if k not in _DENSE_ONLY_KEYS}
        self.config |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": num_experts,
            "num_experts_per_tok": num_experts,
            "intermediate_size": self._columns,
            "sliding_window": spec.sliding_window,
        }
        self._experts: dict[str, tuple[str, str, int]] = {}
        self._routers: set[str] = set()
        self.tensors: dict[str, SourceTensor] = {}
        for name, tensor in inner.tensors.items():
            match = _MLP.fullmatch(name)
            if match is None:
                self.tensors[name] = tensor
                continue
            prefix, part = f"model.layers.{match[1]}.block_sparse_moe.", match[2]
            shape = (spec.hidden_size, self._columns) if part == "down" else (self._columns, spec.hidden_size)
            for expert in range(num_experts):
                split = f"{prefix}experts.{expert}.{_PARTS[part]}.weight"
                self.tensors[split] = SourceTensor(shape, tensor.dtype, tensor.format and f"a part of {tensor.format}")
                self._experts[split] = (name, part, expert)
            if part == "gate":
                router = prefix + "gate.weight"
                self.tensors[router] = SourceTensor((num_experts, spec.hidden_size), tensor.dtype)
                self._routers.add(router)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.generic]:
        """See ``TensorSource.read``. One down projection is kept, since each expert needs some of its columns."""
        if name in self._routers:
            tensor = self.tensors[name]
            return np.zeros(tensor.shape, np.uint16 if tensor.dtype == "bf16" else np.float32)[start:stop]
        if name not in self._experts:
            return self._inner.read(name, start, stop)
        origin, part, expert = self._experts[name]
        first = expert * self._columns
        begin, end, _ = slice(start, stop).indices(self.tensors[name].shape[0])
        if part != "down":
            return self._inner.read(origin, first + begin, first + end)
        if self._last is None or self._last[0] != origin:
            self._last = None  # before the next one is read: never two of them
            self._last = (origin, self._inner.read(origin))
        return self._scaled(self._last[1][begin:end, first : first + self._columns], origin)

    def read_blocks(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.uint8]:
        """See ``TensorSource.read_blocks``."""
        if name in self._experts or name in self._routers:
            return super().read_blocks(name, start, stop)
        return self._inner.read_blocks(name, start, stop)

    def _scaled(self, columns: NDArray[Any], origin: str) -> NDArray[np.generic]:
        """Times E. Exact short of overflow, which is refused."""
        values = bf16.to_f32(columns) if columns.dtype == np.uint16 else columns
        with np.errstate(over="ignore"):
            scaled = values * np.float32(self._num_experts)
        if not np.isfinite(scaled).all():
            raise CheckpointError(f"tensor {origin!r} times {self._num_experts} leaves the range of float32")
        return bf16.from_f32(scaled) if columns.dtype == np.uint16 else scaled

    def write_companions(self, directory: Path) -> None:
        """See ``TensorSource.write_companions``."""
        self._inner.write_companions(directory)

    def release(self) -> None:
        """See ``TensorSource.release``."""
        self._inner.release()

    def close(self) -> None:
        """See ``TensorSource.close``."""
        self._last = None
        self._inner.close()
