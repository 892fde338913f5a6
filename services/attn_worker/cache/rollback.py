"""`Rollback`: to which earlier length a sequence can go back, and how. Part of the KV cache.

A plan's position may lie before what a sequence has, as after rejected drafts; and a sequence whose dense worker died
returns to committed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.attn_worker.cache.cached_sequence import CachedSequence
from services.attn_worker.cache.layer_groups import LayerGroups
from services.attn_worker.cache.sequence_states import SequenceStates
from services.common.errors import RequestAborted


class Rollback:
    """Works on the rows and groups of a `KVCache`, and on the states of a model with gated delta layers."""

    def __init__(self, groups: LayerGroups, states: SequenceStates | None, block_size: int) -> None:
        self._groups = groups
        self._rows = groups.rows
        self._states = states
        self._block_size = block_size

    def go_back(self, sequence: CachedSequence, seq_id: int, position: int) -> None:
        """Forgets the tokens from `position` on, as a plan wants it. The sequence keeps its blocks.

        Raises RequestAborted, and changes nothing, if it lacks something that is read from there on, or if others may
        still read the blocks that would be overwritten.
        """
        row, first = sequence.row, position // self._block_size
        if not self._groups.can_return(row, position):
            raise RequestAborted(
                f"sequence {seq_id} cannot go back to token {position}: it has dropped"
                f" {self._groups.num_dropped_tokens(row)} tokens that are read from there"
            )
        if self._states is not None and not self._states.has(row, position):
            raise RequestAborted(f"sequence {seq_id} cannot go back to token {position}: it has no state there")
        if self._groups.shares_blocks(row, first):
            raise RequestAborted(
                f"sequence {seq_id} cannot go back to token {position}: it shares blocks from there on"
            )
        self._groups.unregister_blocks(row, first, len(sequence.digests))
        self._set_length(sequence, position, min(position, int(self._rows.num_committed[row])))

    def kept_length(self, sequence: CachedSequence, max_tokens: int) -> int | None:
        """The length that the sequence can go back to: its committed tokens, at most `max_tokens`.

        The block that is written next must be neither findable nor shared. If others share it, the whole block is given
        up: recomputing a few tokens is cheaper than copying a block in every layer. With gated delta layers it is the
        greatest length that has a state. None: the next token would read blocks that the sequence has dropped, or there
        is no state.
        """
        row = sequence.row
        num_tokens = min(int(self._rows.num_committed[row]), max_tokens)
        for length in self._lengths(row, num_tokens):
            index, offset = divmod(length, self._block_size)
            if offset and index < len(sequence.digests) and self._groups.shares_blocks(row, index, index + 1):
                if self._states is not None:
                    continue
                length -= offset
            return length if self._groups.can_return(row, length) else None
        return None

    def truncate(self, sequence: CachedSequence, num_tokens: int) -> int:
        """Goes back to `kept_length` tokens; returns how many blocks became free."""
        row, index, num_blocks = sequence.row, num_tokens // self._block_size, -(-num_tokens // self._block_size)
        self._groups.unregister_blocks(row, index, min(num_blocks, len(sequence.digests)))
        self._set_length(sequence, num_tokens, num_tokens)
        return self._groups.release_blocks(row, num_blocks)

    def _lengths(self, row: int, num_tokens: int) -> Iterator[int]:
        """The lengths up to `num_tokens` that might do, greatest first."""
        if self._states is None:
            yield num_tokens
        else:
            yield from self._states.lengths(row, num_tokens)

    def _set_length(self, sequence: CachedSequence, num_computed: int, num_committed: int) -> None:
        row = sequence.row
        del sequence.digests[num_computed // self._block_size :]
        self._rows.num_hashed_blocks[row] = len(sequence.digests)
        self._rows.num_computed[row], self._rows.num_committed[row] = num_computed, num_committed
        if self._states is not None:
            self._states.truncate(row, num_computed)
