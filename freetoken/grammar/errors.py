"""What goes wrong with grammars."""

from __future__ import annotations

from freetoken.errors import FreeTokenError


class GrammarError(FreeTokenError):
    """A grammar that cannot be used. ``path`` is where in a JSON schema (as JSON pointer; empty for its root or when
    there is none), ``reason`` why."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(reason, path)
        self.reason = reason
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.path else self.reason


class ConstraintError(FreeTokenError):
    """A request whose output can no longer follow its grammar. It ends; nobody else does."""
