"""Allocating an arena anew, by its new division or its old one."""

from dataclasses import dataclass, field

import pytest

from freetoken.elastic.arena_shape import ArenaSplit
from freetoken.errors import CapacityError
from freetoken.execution.division import Division, divide_anew

OLD, NEW = Division(ArenaSplit(6, 4), 60, 40), Division(ArenaSplit(4, 6), 40, 60)


@dataclass
class Device:
    """An arena and its user in one; ``fails`` are the calls that do, by number."""

    fails: tuple[int, ...] = ()
    division: Division = OLD
    said: list[str] = field(default_factory=list)

    def _note(self, what: str) -> None:
        self.said.append(what)
        if len(self.said) in self.fails:
            raise CapacityError(f"call {len(self.said)}")

    def reallocate(self, division: Division) -> None:
        self._note(f"allocate {division.num_slots}")
        self.division = division

    def release_arena(self) -> None:
        self._note("release")

    def follow_arena(self) -> None:
        self._note("follow")


def test_the_new_division() -> None:
    device = Device()
    assert divide_anew(device, device, NEW) == ""
    assert device.division == NEW and device.said == ["release", "allocate 40", "follow"]


def test_the_old_one_when_memory_is_short() -> None:
    device = Device(fails=(2,))
    assert divide_anew(device, device, NEW) == "CapacityError: call 2"
    assert device.division == OLD and device.said[2:] == ["release", "allocate 60", "follow"]


def test_the_old_one_when_nothing_can_be_built_on_the_new_one() -> None:
    device = Device(fails=(3,))
    assert divide_anew(device, device, NEW) == "CapacityError: call 3"
    assert device.division == OLD and device.said[3:] == ["release", "allocate 60", "follow"]


@pytest.mark.parametrize("fails", [(2, 4), (3, 6)])
def test_when_neither_can_be_had_that_is_said(fails: tuple[int, ...]) -> None:
    device = Device(fails)
    with pytest.raises(CapacityError, match=f"call {fails[1]}"):
        divide_anew(device, device, NEW)
