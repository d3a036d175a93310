"""Masks of constrained requests, computed beside the steps: when a token is known, a helper thread takes it through the
request's grammar and finds out what may follow, while the next forward runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from freetoken.errors import FreeTokenError
from freetoken.grammar import ConstraintError, GrammarCompiler, Matcher, load_vocabulary
from freetoken.grammar.matcher import Mask, num_words

if TYPE_CHECKING:
    from freetoken.execution.batch_state import RequestState

logger = logging.getLogger(__name__)

HELPER_THREADS = 2
MASK_TIMEOUT_S = 5.0
"""A mask takes some 50 us, a grammar below a second; a request whose mask takes longer than this fails."""


class Grammars:
    """The vocabulary of a checkpoint, read by a helper thread from the beginning on, and the helper threads. Lives as
    long as the model; ``open`` from the step thread."""

    def __init__(self, directory: str | Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._directory = Path(directory)
        self._eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = vocab_size
        self._pool = ThreadPoolExecutor(HELPER_THREADS, "ft-masks")
        self._compiler = self._pool.submit(self._load)

    def _load(self) -> GrammarCompiler:
        started_s = time.monotonic()
        vocabulary = load_vocabulary(self._directory, self.vocab_size, self._eos_token_ids)
        logger.info(
            "event=grammar_vocabulary_loaded tokens=%d elapsed_s=%.2f", vocabulary.size, time.monotonic() - started_s
        )
        return GrammarCompiler(vocabulary)

    def open(self, state: RequestState) -> RequestGrammar | None:
        """The grammar of a request that has one, already past the tokens generated before; None for others."""
        return None if state.sampling.constraint is None else RequestGrammar(self._pool, self._compiler, state)

    def close(self) -> None:
        """End the helpers after what they are doing; masks that are still wanted fail."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class RequestGrammar:
    """One request's place in its grammar. ``advance`` and ``mask`` from one thread at a time; neither blocks, except
    ``mask`` while a helper is still at it."""

    def __init__(self, pool: ThreadPoolExecutor, compiler: Future[GrammarCompiler], state: RequestState) -> None:
        self._pool = pool
        self._constraint = state.sampling.constraint
        self._end_token_ids = (*state.eos_token_ids, *state.sampling.stop_token_ids)
        self._min_tokens = state.sampling.min_tokens
        self._matcher: Matcher | None = None
        self._num_output = 0
        self._future = self._submit(None, compiler, tuple(state.tokens[state.num_prompt :]))

    def advance(self, token_id: int) -> None:
        """The token that was sampled with the last mask; its successor's mask is begun."""
        self._future = self._submit(self._future, None, (token_id,))

    def mask(self) -> Mask:
        """Which tokens may come next; valid until ``advance``. Raises ``ConstraintError`` when the request cannot go
        on."""
        try:
            return self._future.result(MASK_TIMEOUT_S)
        except FutureTimeoutError:
            raise ConstraintError(f"the grammar needed more than {MASK_TIMEOUT_S:g} s for one token") from None
        except CancelledError:
            raise ConstraintError("the engine is stopping") from None
        except FreeTokenError as error:
            raise ConstraintError(str(error)) from None
        except Exception as error:
            raise ConstraintError(f"the grammar failed: {error!r}") from error

    def _submit(
        self, before: Future[Mask] | None, compiler: Future[GrammarCompiler] | None, token_ids: tuple[int, ...]
    ) -> Future[Mask]:
        try:
            return self._pool.submit(self._run, before, compiler, token_ids)
        except RuntimeError:  # shut down
            future: Future[Mask] = Future()
            future.cancel()
            return future

    def _run(
        self, before: Future[Mask] | None, compiler: Future[GrammarCompiler] | None, token_ids: tuple[int, ...]
    ) -> Mask:
        try:
            if before is not None:  # it was begun before this one, so it ends
                before.result()
            if compiler is not None:
                assert self._constraint is not None
                found = compiler.result()
                ends = (*self._end_token_ids, *found.vocabulary.eos_token_ids)
                self._matcher = Matcher(found, self._constraint, ends)
            matcher = self._matcher
            assert matcher is not None
            matcher.advance(token_ids)
            self._num_output += len(token_ids)
            mask = np.empty(num_words(matcher.vocab_size), dtype=np.uint32)
            matcher.fill(mask, may_end=self._num_output >= self._min_tokens)
            return mask
        except Exception:
            raise
        except BaseException as error:  # a panic of the library, which Python does not count among exceptions
            raise ConstraintError(f"the grammar failed: {error}") from None


def allowed(mask: Mask, vocab_size: int) -> NDArray[np.bool_]:
    """``mask`` as one flag a token."""
    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
