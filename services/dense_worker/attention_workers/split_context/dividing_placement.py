"""`DividingPlacement`: a `SpreadPlacement` that divides sequences which may outgrow every KV cache among several."""

from __future__ import annotations

import time
from collections.abc import Mapping

from services.dense_worker.attention_workers.spread_placement import SpreadPlacement
from services.dense_worker.engine.block_ledger import BlockLedger, DividedLedger
from services.dense_worker.engine.placement import Room
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import Session


class DividingPlacement(SpreadPlacement):
    """Such a sequence gets all blocks that it may ever need at once, from as few KV caches as have them.

    While an attention worker that has died may come back, what all have had together counts as being there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._most_blocks = 0  # of all KV caches together, those that are missing included
        self._awaits_until_s = 0.0  # on the monotonic clock

    def room_for(self, sequence: Sequence, ledgers: Mapping[int, BlockLedger], *, awaits: bool = False) -> Room:
        whole = super().room_for(sequence, ledgers)
        if (reason := _why_whole(sequence)) is not None:
            return whole._replace(text=f"{whole.text}, and {reason} is not split")
        num_blocks = sum(each.num_blocks for each in ledgers.values())
        if awaits and time.monotonic() < self._awaits_until_s:
            num_blocks = max(num_blocks, self._most_blocks)
        return Room(num_blocks, f"all caches together have {num_blocks}")

    def divide(self, sequence: Sequence, num_blocks: int, session: Session) -> DividedLedger | None:
        if _why_whole(sequence) is not None:
            return None
        num_missing, shares = num_blocks, dict[int, tuple[BlockLedger, int]]()
        barred = session.draining | session.short_caches
        free = [each for each in session.ledgers.items() if each[0] not in barred]
        for cache_id, ledger in sorted(free, key=lambda each: (-each[1].num_available_blocks, each[0])):
            if num_missing and (share := min(num_missing, ledger.num_available_blocks)):
                shares[cache_id] = ledger, share
                num_missing -= share
        return None if num_missing else DividedLedger(shares)

    def expect(self, num_blocks: int, until_s: float) -> None:
        if time.monotonic() < self._awaits_until_s:
            num_blocks = max(num_blocks, self._most_blocks)
        self._most_blocks, self._awaits_until_s = num_blocks, until_s

    def expect_less(self, num_blocks: int) -> None:
        self._most_blocks -= num_blocks


def _why_whole(sequence: Sequence) -> str | None:
    """What of a sequence needs all its keys in one KV cache; None: nothing does."""
    if sequence.policy is not None:
        return "a request with beams"
    if sequence.group_id:
        return "one of several answers to a prompt"
    return "a prompt with pictures" if sequence.spec.spans else None
