"""Checkpoints of random weights with the dimensions of real models, for benchmarks and tests of the engine."""

from freetoken.checkpoint.synthetic.generate import SynthOptions, SynthResult, synthesize
from freetoken.checkpoint.synthetic.locality import benchmark_prompt
from freetoken.checkpoint.synthetic.routing import RoutingReport, measure_routing
from freetoken.checkpoint.synthetic.shapes import SHAPES, shape_config
from freetoken.checkpoint.synthetic.weights import SyntheticWeights

__all__ = [
    "SHAPES",
    "RoutingReport",
    "SynthOptions",
    "SynthResult",
    "SyntheticWeights",
    "benchmark_prompt",
    "measure_routing",
    "shape_config",
    "synthesize",
]
