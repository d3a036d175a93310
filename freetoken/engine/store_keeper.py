"""Who has the store, and who hands it on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from freetoken.engine.lifecycle import ActorHandle
from freetoken.engine.members import Member
from freetoken.engine.phases import STORE_HOLDERS
from freetoken.messages import ActorName

log = logging.getLogger(__name__)


class StoreKeeper:
    """Reads ``holds_store`` of the supervisor's members; ``own_holds_store`` answers for the Controller itself."""

    def __init__(
        self,
        own: Member,
        others: Mapping[ActorName, Member],
        own_holds_store: Callable[[], bool],
        share_timeout_s: float,
    ) -> None:
        self._own = own
        self._others = others
        self._own_holds_store = own_holds_store
        self._share_timeout_s = share_timeout_s

    def holders(self) -> list[tuple[Member, ActorHandle]]:
        """The living holders, in the order they are to be asked."""
        self._own.holds_store = self._own_holds_store()
        members = [self._own if name is self._own.name else self._others[name] for name in STORE_HOLDERS]
        return [(m, m.handle) for m in members if m.handle is not None and m.holds_store]

    async def share(self, to: ActorName, epoch: int) -> bool:
        """Have a holder send the store to ``to`` once that holder has entered ``epoch``. False when none could."""
        for member, handle in self.holders():
            if member.name == to:
                continue
            try:
                await asyncio.wait_for(handle.share_store(to, epoch), self._share_timeout_s)
                log.info("event=store_shared holder=%s to=%s epoch=%d", member.name, to, epoch)
                return True
            except Exception as error:
                log.warning("event=share_store_failed holder=%s to=%s error=%r", member.name, to, error)
        return False
