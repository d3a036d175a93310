"""How much consecutive tokens have in common: groups of similar tokens, and ways to walk through them.

Token ids are cut into groups of ``GROUP_TOKENS`` neighbours. The embeddings of a group share a centroid, so that any
two of them have the same cosine; those of different groups have nothing in common. A router sees almost only the
embedding, so two tokens of a group choose the same experts to the degree that the cosine says, and two tokens of
different groups agree by chance (K / E).

*Locality* is that degree without the chance: with locality x, a token of the same group is expected to have chosen
``K / E + x * (1 - K / E)`` of a token's experts. 0 makes all tokens independent. (Recorded traces of real models with
128 experts lie between 0.2 and 0.35.)

The *walk* is the order in which the model generates under greedy sampling: it passes through all tokens of a group,
then goes on to another group, and visits every ordinary token once before it repeats itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.synthetic.streams import stream
from freetoken.checkpoint.synthetic.vocabulary import num_text_tokens
from freetoken.errors import CheckpointError
from freetoken.models.spec import ModelSpec

GROUP_TOKENS = 64
MAX_LOCALITY = 0.9
_SAMPLES = 2000
_HALVINGS = 24


def cosine_for_locality(locality: float, num_experts: int, num_experts_per_tok: int) -> float:
    """The cosine of two embeddings whose tokens share experts as ``locality`` says, when router weights are random.

    Router logits of two such tokens are normal numbers with that correlation; the expected share of common top-K
    experts is estimated from samples and rises with the cosine, so the answer is found by halving.
    """
    if not 0 <= locality <= MAX_LOCALITY:
        raise CheckpointError(f"locality {locality} is not between 0 and {MAX_LOCALITY}")
    if locality == 0:
        return 0.0
    if not 0 < num_experts_per_tok < num_experts:
        raise CheckpointError(
            f"locality {locality} needs a choice of experts; the model uses {num_experts_per_tok} of {num_experts}"
        )
    chance = num_experts_per_tok / num_experts
    wanted = chance + locality * (1 - chance)
    random = np.random.default_rng(0)
    one, other = random.standard_normal((2, _SAMPLES, num_experts))
    chosen = _chosen(one, num_experts_per_tok)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        related = _chosen(middle * one + np.sqrt(1 - middle**2) * other, num_experts_per_tok)
        if (chosen & related).sum() < wanted * num_experts_per_tok * _SAMPLES:
            low = middle
        else:
            high = middle
    return high


def _chosen(logits: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    chosen = np.zeros(logits.shape, bool)
    np.put_along_axis(chosen, np.argpartition(-logits, count - 1, axis=1)[:, :count], True, axis=1)
    return chosen


@dataclass(frozen=True, eq=False)
class Walk:
    """``order`` [N]: the ordinary tokens as they follow each other, in a circle; ``position`` [N] is its inverse."""

    order: NDArray[np.int64]
    position: NDArray[np.int64]

    def after(self, token: int, count: int) -> NDArray[np.int64]:
        """The ``count`` tokens that follow ``token``."""
        steps = (self.position[token] + 1 + np.arange(count)) % len(self.order)
        return self.order[steps]

    def before(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Each token's predecessor."""
        return self.order[self.position[tokens] - 1]


def plan_walk(vocab_size: int, seed: int) -> Walk:
    """The walk of the model with this vocabulary and seed: random, but group by group."""
    num_tokens = num_text_tokens(vocab_size)
    random = np.random.Generator(stream(seed, "walk"))
    num_groups = -(-num_tokens // GROUP_TOKENS)
    rank = random.permutation(num_groups)
    order = np.lexsort((random.random(num_tokens), rank[np.arange(num_tokens) // GROUP_TOKENS])).astype(np.int64)
    position = np.empty_like(order)
    position[order] = np.arange(num_tokens)
    return Walk(order, position)


def benchmark_prompt(spec: ModelSpec, num_tokens: int, locality: float = 0.0, seed: int = 0) -> NDArray[np.int64]:
    """``num_tokens`` ordinary token ids for a synthetic model.

    ``locality`` is the probability that a token comes from the group of the one before it: 0 draws independent tokens,
    1 stays in a group for all its tokens, as the model's own greedy walk does. A prompt of locality p to a model of
    locality x has locality p * x in the terms of this module. No token repeats within its stay in a group. Raises
    ``CheckpointError`` for a probability that is none.
    """
    if not 0 <= locality <= 1:
        raise CheckpointError(f"prompt locality {locality} is not between 0 and 1")
    if num_tokens < 0:
        raise CheckpointError(f"a prompt cannot have {num_tokens} tokens")
    num_text = num_text_tokens(spec.vocab_size)
    random = np.random.Generator(stream(seed, "prompt"))
    if locality == 0:
        return random.integers(num_text, size=num_tokens)
    tokens = np.empty(num_tokens, np.int64)
    filled = 0
    while filled < num_tokens:
        start = int(random.integers(num_text)) // GROUP_TOKENS * GROUP_TOKENS
        members = start + random.permutation(min(GROUP_TOKENS, num_text - start))
        stay = int(random.geometric(1 - locality)) if locality < 1 else GROUP_TOKENS
        stay = min(stay, len(members), num_tokens - filled)
        tokens[filled : filled + stay] = members[:stay]
        filled += stay
    return tokens
