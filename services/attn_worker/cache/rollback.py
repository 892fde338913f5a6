"""`Rollback`: to which earlier length a sequence can go back, and how. Part of the KV cache.

A plan's position may lie before what a sequence has, as after rejected drafts; and a sequence whose dense worker died
returns to committed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.attn_worker.cache.cached_sequence import CachedSequence, SequenceRows
from services.attn_worker.cache.group import CacheGroup
from services.common.errors import RequestAborted


class Rollback:
    """Works on the rows and groups of a `KVCache`."""

    def __init__(self, rows: SequenceRows, groups: Sequence[CacheGroup], block_size: int) -> None:
        self._groups = groups
        self._rows = rows
        self._block_size = block_size

    def go_back(self, sequence: CachedSequence, seq_id: int, position: int) -> None:
        """Forgets the tokens from `position` on, as a plan wants it. The sequence keeps its blocks.

        Raises RequestAborted, and changes nothing, if it lacks something that is read from there on, or if others may
        still read the blocks that would be overwritten.
        """
        row = sequence.row
        for group in self._groups:
            reason = group.lack_at(row, position)
            if reason is None and group.is_shared(row, position):
                reason = "it shares blocks from there on"
            if reason is not None:
                raise RequestAborted(f"sequence {seq_id} cannot go back to token {position}: {reason}")
        for group in self._groups:
            group.go_back(row, position, len(sequence.digests))
        self._set_length(sequence, position, min(position, int(self._rows.num_committed[row])))

    def kept_length(self, sequence: CachedSequence, max_tokens: int) -> int | None:
        """The length that the sequence can go back to in all groups: of its committed tokens, at most `max_tokens`.

        None: there is none.
        """
        row = sequence.row
        length = min(int(self._rows.num_committed[row]), max_tokens)
        while True:
            kept: int | None = length
            for group in self._groups:
                kept = group.kept_length(row, kept, len(sequence.digests))
                if kept is None:
                    return None
            if kept == length:
                return length
            length = kept

    def truncate(self, sequence: CachedSequence, length: int) -> int:
        """Goes back to a `kept_length`; returns how many blocks became free."""
        num_hashed_blocks = len(sequence.digests)
        num_freed, *_ = [group.truncate(sequence.row, length, num_hashed_blocks) for group in self._groups]
        self._set_length(sequence, length, length)
        return num_freed

    def _set_length(self, sequence: CachedSequence, num_computed: int, num_committed: int) -> None:
        row = sequence.row
        del sequence.digests[num_computed // self._block_size :]
        self._rows.num_hashed_blocks[row] = len(sequence.digests)
        self._rows.num_computed[row], self._rows.num_committed[row] = num_computed, num_committed
