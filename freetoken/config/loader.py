"""Settings by precedence: schema default < profile < environment < flag.

A profile is a YAML file with the schema's sections; it may name another in ``extends``. Environment variables are
``FREETOKEN_`` plus the key in capitals with ``__`` between sections (``FREETOKEN_SERVER__PORT=9000``). Flags are
``--set section.key=value``; values are read as YAML, so ``--set server.api_keys='[a, b]'`` works.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from freetoken.config.schema import EngineConfig
from freetoken.errors import ConfigError

ENVIRONMENT_PREFIX = "FREETOKEN_"
# Read elsewhere, not settings of the engine.
_FOREIGN_VARIABLES = frozenset(
    {
        "FREETOKEN_LOG",
        "FREETOKEN_DEMO_QUESTION",
        "FREETOKEN_API_KEY",
        "FREETOKEN_CLIENTS_DIR",
        "FREETOKEN_INSTALL_CLIENTS",
    }
)


def profile_directories() -> list[Path]:
    """Where profiles are looked up: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent.parent
    return [d for d in (package.parent / "configs", package / "configs") if d.is_dir()]


def list_profiles() -> dict[str, Path]:
    """Name -> file of every shipped profile."""
    return {path.stem: path for directory in profile_directories() for path in sorted(directory.glob("*.yaml"))}


def load_profile(name: str) -> dict[str, Any]:
    """The settings of a shipped profile (by name) or of a file (by path), with its ``extends`` chain merged.

    Raises ``ConfigError`` naming the profile when it does not exist, is not a mapping, or extends itself.
    """
    return _load_profile(name, ())


def _load_profile(name: str, seen: tuple[str, ...]) -> dict[str, Any]:
    if name in seen:
        raise ConfigError(f"profile {name!r} extends itself: {' -> '.join((*seen, name))}")
    profiles = list_profiles()
    path = profiles.get(name) or Path(name)
    if not path.is_file():
        raise ConfigError(f"profile {name!r} is neither a shipped profile ({', '.join(sorted(profiles))}) nor a file")
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"profile {path}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"profile {path}: expected a mapping of sections, found {type(data).__name__}")
    parent = data.pop("extends", None)
    return merge(_load_profile(str(parent), (*seen, name)), data) if parent else data


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` on top of ``base``; mappings merge key by key, anything else replaces."""
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merge(result[key], value)
        else:
            result[key] = value
    return result


def settings_from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Settings named by ``FREETOKEN_*`` variables; unknown names fail later in validation, by their key."""
    result: dict[str, Any] = {}
    for name, text in environment.items():
        if name.startswith(ENVIRONMENT_PREFIX) and name not in _FOREIGN_VARIABLES:
            path = name[len(ENVIRONMENT_PREFIX) :].lower().split("__")
            result = merge(result, _nested(path, _value(text)))
    return result


def settings_from_flags(assignments: Iterable[str]) -> dict[str, Any]:
    """Settings from ``section.key=value`` strings. Raises ``ConfigError`` for one without ``=``."""
    result: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {assignment!r}: expected section.key=value")
        result = merge(result, _nested(key.strip().split("."), _value(text)))
    return result


def load_config(
    *,
    profile: str | None = None,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> EngineConfig:
    """The validated settings. ``flags`` is a nested mapping (see ``settings_from_flags``) and wins over all else.

    Raises ``ConfigError`` with one line per problem: the key, the value, and what is allowed.
    """
    settings = load_profile(profile) if profile else {}
    settings = merge(settings, settings_from_environment(os.environ if environment is None else environment))
    settings = merge(settings, flags or {})
    try:
        return EngineConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(item) for item in error.errors())) from error


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _describe(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{key}: unknown setting; known here: {', '.join(_known_keys(item['loc'][:-1]))}"
    if item["type"] == "missing":
        return f"{key}: required"
    return f"{key}: {item['msg'].removeprefix('Value error, ')} (got {item['input']!r})"


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    model: type[BaseModel] = EngineConfig
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return sorted(model.model_fields)
