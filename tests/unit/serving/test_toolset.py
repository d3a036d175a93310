"""Names of tools: what the model sees, and back."""

from __future__ import annotations

from freetoken.serving.tools import ToolChoice, ToolSpec
from freetoken.serving.toolset import Toolset

EXEC = ToolSpec("exec")
SPAWN = ToolSpec("spawn", namespace="agents")
PATCH = ToolSpec("patch", kind="custom")
LATER = ToolSpec("later", deferred=True)


def names(tools: tuple[ToolSpec, ...]) -> list[str]:
    return [tool.name for tool in tools]


def test_a_members_inner_name_is_used_where_it_is_free() -> None:
    toolset = Toolset([EXEC, SPAWN])
    assert names(toolset.flat) == ["exec", "spawn"]
    assert toolset.find("spawn") is SPAWN
    assert toolset.find("agents.spawn") is SPAWN
    assert toolset.find("agents__spawn") is SPAWN
    assert toolset.find("other__spawn") is None
    assert toolset.flat_name("spawn", "agents") == "spawn"


def test_members_of_the_same_name_are_told_apart() -> None:
    other = ToolSpec("spawn", namespace="threads")
    plain = ToolSpec("spawn")
    toolset = Toolset([SPAWN, other, plain])
    assert names(toolset.flat) == ["agents__spawn", "threads__spawn", "spawn"]
    assert toolset.find("agents__spawn") is SPAWN
    assert toolset.find("threads/spawn") is other
    assert toolset.find("spawn") is plain
    assert toolset.flat_name("spawn", "threads") == "threads__spawn"
    assert toolset.flat_name("spawn", "gone") == "gone__spawn"
    assert toolset.flat_name("gone", "gone") == "gone"


def test_deferred_tools_are_callable_but_not_visible() -> None:
    toolset = Toolset([EXEC, LATER])
    assert names(toolset.visible) == ["exec"]
    assert names(toolset.callable) == ["exec", "later"]


def test_a_choice_restricts_what_is_callable_not_what_is_visible() -> None:
    toolset = Toolset([EXEC, SPAWN, PATCH], ToolChoice("named", ("spawn",)))
    assert names(toolset.visible) == ["exec", "spawn", "patch"]
    assert names(toolset.callable) == ["spawn"]
    assert not Toolset([EXEC], ToolChoice("none")).visible


def test_the_first_of_two_declarations_counts() -> None:
    toolset = Toolset([ToolSpec("a", description="one"), ToolSpec("a", description="two")])
    assert [tool.description for tool in toolset.flat] == ["one"]
