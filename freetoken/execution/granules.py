"""Physical memory in granules, mapped into pools at fixed addresses. No torch.

A granule moves in two steps. It is first mapped at the end of the pool that grows, while the pool that shrinks still
has it: one granule at two addresses, which both CUDA and Linux allow. Nothing is given up before everything that can
fail has been done, so undoing it is only unmapping; and no memory beyond the budget is ever allocated. Only after the
commit, and after whatever still reads the old place, is it unmapped there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from freetoken import _native
from freetoken.errors import CapacityError, FreeTokenError
from freetoken.units import format_bytes

logger = logging.getLogger(__name__)


class GranuleDriver(Protocol):
    """What ``Granules`` needs of a device. Ranges and granules are whatever the driver likes. Every call may raise
    ``FreeTokenError``, having changed nothing."""

    alignment_bytes: int

    def reserve(self, name: str, size_bytes: int) -> Any:
        """A range of addresses without memory."""
        ...

    def create(self, size_bytes: int) -> Any:
        """A granule of physical memory. ``CapacityError`` when memory is short."""
        ...

    def map(self, where: Any, offset: int, size_bytes: int, granule: Any) -> None:
        """Put ``granule`` there; it may be mapped elsewhere too."""
        ...

    def allow(self, where: Any, offset: int, size_bytes: int) -> None:
        """Let the device use what was mapped there."""
        ...

    def unmap(self, where: Any, offset: int, size_bytes: int) -> None:
        """Nothing may use that place any more."""
        ...

    def destroy(self, granule: Any, size_bytes: int) -> None:
        """Give the memory back once it is mapped nowhere."""
        ...

    def free(self, where: Any, size_bytes: int) -> None:
        """Give the addresses back; nothing is mapped there."""
        ...


@dataclass
class Pool:
    """A range of addresses whose first ``len(granules)`` granules are mapped."""

    name: str
    where: Any
    max_granules: int
    granules: list[Any] = field(default_factory=list)


class Granules:
    """One budget and its pools. Used by one thread at a time.

    ``prepare`` (may fail, then nothing has changed) -> ``commit`` (cannot fail) -> ``release`` once the places that
    went are out of use; or ``prepare`` -> ``abort``.
    """

    def __init__(
        self,
        driver: GranuleDriver,
        granule_bytes: int,
        num_granules: int,
        pools: Mapping[str, tuple[int, int]],
        advice: str = "--vram",
    ) -> None:
        """``pools``: name -> (granules now, most granules). Raises ``CapacityError`` when memory is short; then nothing
        is left allocated."""
        if granule_bytes % driver.alignment_bytes:
            raise ValueError(f"granules of {granule_bytes} bytes are no multiple of {driver.alignment_bytes}")
        self.granule_bytes = granule_bytes
        self.num_granules = num_granules
        self.pools: dict[str, Pool] = {}
        self._driver = driver
        self._spare: list[Any] = []
        self._prepared: dict[str, list[Any]] | None = None
        self._wanted: dict[str, int] = {}
        # Places to unmap as soon as that works: (pool's range, offset, bytes).
        self._leaving: list[tuple[Any, int, int]] = []
        if sum(now for now, _ in pools.values()) > num_granules:
            raise ValueError(f"pools of {dict(pools)} granules exceed the budget of {num_granules}")
        try:
            for name, (_, most) in pools.items():
                self.pools[name] = Pool(name, driver.reserve(name, most * granule_bytes), most)
            for _ in range(num_granules):
                self._spare.append(driver.create(granule_bytes))
            self.prepare({name: now for name, (now, _) in pools.items()})
            self.commit()
        except FreeTokenError as error:
            self.close()
            if isinstance(error, CapacityError):
                raise CapacityError(
                    f"{format_bytes(num_granules * granule_bytes)} for expert slots and KV blocks are not available "
                    f"({error}); lower {advice}"
                ) from error
            raise

    def size(self, name: str) -> int:
        """Granules of a pool."""
        return len(self.pools[name].granules)

    def prepare(self, wanted: Mapping[str, int]) -> None:
        """Map what growing pools will get, from spare granules first, then from the ends of pools that shrink.

        Raises ``FreeTokenError`` when the driver refuses (then everything is as before) and ``ValueError`` for sizes
        that are not possible.
        """
        if self._prepared is not None:
            raise ValueError("a change is under way")
        for name, count in wanted.items():
            if not 0 <= count <= self.pools[name].max_granules:
                raise ValueError(f"pool {name} of {count} granules; it has at most {self.pools[name].max_granules}")
        sizes = {name: wanted.get(name, len(pool.granules)) for name, pool in self.pools.items()}
        if sum(sizes.values()) > self.num_granules:
            raise ValueError(f"pools of {sizes} granules exceed the budget of {self.num_granules}")
        self.release()
        if self._leaving:
            raise FreeTokenError("memory of an earlier change is still mapped at its old place")
        source = list(self._spare)
        for name, pool in self.pools.items():
            source += reversed(pool.granules[sizes[name] :])
        arriving: dict[str, list[Any]] = {}
        done: list[tuple[Any, int, int]] = []
        try:
            for name, pool in self.pools.items():
                count = sizes[name] - len(pool.granules)
                if count <= 0:
                    continue
                begin = len(pool.granules) * self.granule_bytes
                arriving[name] = []
                for number in range(count):
                    granule = source[sum(map(len, arriving.values()))]
                    offset = begin + number * self.granule_bytes
                    self._driver.map(pool.where, offset, self.granule_bytes, granule)
                    done.append((pool.where, offset, self.granule_bytes))
                    arriving[name].append(granule)
                self._driver.allow(pool.where, begin, count * self.granule_bytes)
        except FreeTokenError:
            self._leaving += done
            self.release()
            raise
        self._prepared, self._wanted = arriving, sizes

    def commit(self) -> None:
        """The pools have their new sizes. Places that went stay mapped until ``release``."""
        assert self._prepared is not None
        arriving, self._prepared = self._prepared, None
        gone: list[Any] = []
        for name, pool in self.pools.items():
            size = self._wanted[name]
            for number in range(size, len(pool.granules)):
                self._leaving.append((pool.where, number * self.granule_bytes, self.granule_bytes))
            gone += reversed(pool.granules[size:])
            del pool.granules[size:]
            pool.granules += arriving.get(name, ())
        taken = sum(map(len, arriving.values()))
        self._spare = (self._spare + gone)[taken:]

    def abort(self) -> None:
        """Undo ``prepare``."""
        if self._prepared is None:
            return
        arriving, self._prepared = self._prepared, None
        for name, granules in arriving.items():
            pool = self.pools[name]
            for number in range(len(granules)):
                self._leaving.append(
                    (pool.where, (len(pool.granules) + number) * self.granule_bytes, self.granule_bytes)
                )
        self.release()

    def release(self) -> None:
        """Unmap the places that went. What cannot be unmapped is tried again before the next change."""
        leaving, self._leaving = self._leaving, []
        for where, offset, size_bytes in leaving:
            try:
                self._driver.unmap(where, offset, size_bytes)
            except FreeTokenError as error:
                logger.warning("event=granule_not_unmapped offset=%d detail=%r", offset, str(error))
                self._leaving.append((where, offset, size_bytes))

    def close(self) -> None:
        """Give everything back; idempotent. Nothing may use the memory any more."""
        self.abort()
        granules = list(self._spare)
        for pool in self.pools.values():
            for number in range(len(pool.granules)):
                self._leaving.append((pool.where, number * self.granule_bytes, self.granule_bytes))
            granules += pool.granules
            pool.granules = []
        self._spare = []
        self.release()
        self.release()  # once more what could not be unmapped; then it stays
        for granule in granules:
            self._try(self._driver.destroy, granule, self.granule_bytes)
        pools, self.pools = self.pools, {}
        for pool in pools.values():
            self._try(self._driver.free, pool.where, pool.max_granules * self.granule_bytes)

    @staticmethod
    def _try(call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except FreeTokenError as error:
            logger.warning("event=granule_not_freed detail=%r", str(error))

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` unless every granule has exactly one owner."""
        owned = [granule for pool in self.pools.values() for granule in pool.granules] + self._spare
        assert len(owned) == self.num_granules == len({id(g) if not isinstance(g, int) else g for g in owned})
        for pool in self.pools.values():
            assert len(pool.granules) <= pool.max_granules


class HostGranules:
    """``GranuleDriver`` of the CPU device: granules are parts of one shared segment that is allocated at once."""

    alignment_bytes = 4096

    def __init__(self, size_bytes: int) -> None:
        """Raises ``CapacityError`` when host memory is short."""
        try:
            self._memory = _native.SharedSegment.create("freetoken-arena", size_bytes)
            self._memory.populate()
        except (MemoryError, OSError) as error:
            raise CapacityError(str(error)) from error
        self._created_bytes = 0

    def reserve(self, name: str, size_bytes: int) -> _native.SharedSegment:
        try:
            return _native.SharedSegment.reserve(f"freetoken-{name}", size_bytes)
        except (MemoryError, OSError) as error:
            raise FreeTokenError(str(error)) from error

    def create(self, size_bytes: int) -> int:
        offset = self._created_bytes
        if offset + size_bytes > self._memory.size_bytes:
            raise CapacityError(f"all {self._memory.size_bytes} bytes are in use")
        self._created_bytes += size_bytes
        return offset

    def map(self, where: _native.SharedSegment, offset: int, size_bytes: int, granule: int) -> None:
        try:
            where.map(offset, size_bytes, self._memory, granule)
        except (MemoryError, OSError) as error:
            raise FreeTokenError(str(error)) from error

    def allow(self, where: _native.SharedSegment, offset: int, size_bytes: int) -> None:
        return

    def unmap(self, where: _native.SharedSegment, offset: int, size_bytes: int) -> None:
        try:
            where.unmap(offset, size_bytes)
        except (MemoryError, OSError) as error:
            raise FreeTokenError(str(error)) from error

    def destroy(self, granule: int, size_bytes: int) -> None:
        return  # the segment goes as a whole

    def free(self, where: _native.SharedSegment, size_bytes: int) -> None:
        return  # when its last user lets go of it
