"""A repair of Triton's interpreter, for tests without a GPU: 3.6 turns one-element arrays into loop bounds in a way
that numpy 2.4 refuses."""

from __future__ import annotations

from typing import Any

import triton


def repair() -> None:
    """Make scalar tensors usable as loop bounds again. Harmless where nothing is broken."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


INTERPRETED = bool(triton.knobs.runtime.interpret)
if INTERPRETED:
    repair()
