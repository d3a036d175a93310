"""Settings: schema, and loading by precedence (default < profile < environment < flag)."""

from freetoken.config.schema import EngineConfig

__all__ = ["EngineConfig"]
