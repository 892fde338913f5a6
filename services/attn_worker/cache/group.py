"""`CacheGroup`: what the layers of one kind keep of each sequence. The KV cache is a list of such groups.

A sequence has the same row in every group. `KVCache` asks all groups alike and knows no kind of them; the first group's
blocks are those that the scheduler counts, and the only ones in the numbers of freed blocks that the cache returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.attn_worker.cache.block_pool import BlockPool
from services.attn_worker.cache.cached_sequence import CachedSequence, SequenceRows
from services.attn_worker.cache.step_metadata import StepMetadata


@dataclass(frozen=True, slots=True)
class Batch:
    """The entries of a step. The lengths in `SequenceRows` include it already."""

    rows: np.ndarray  # int64 [num_entries], of their sequences; different, except those that have failed
    positions: np.ndarray  # int64 [num_entries], of their first tokens
    num_tokens: np.ndarray  # int64 [num_entries], at least 1
    has_failed: np.ndarray  # bool [num_entries]: their rows of the step read and write nothing that anybody has


class CacheGroup(Protocol):
    """The blocks, or slots, of one kind of layers. Only the attention worker's engine thread calls it.

    A position counts tokens from the beginning of a sequence, digests name its full blocks from the first one on.
    """

    name: str  # for metrics; unique in a cache
    pool: BlockPool
    window: int | None  # a token reads so many tokens of a row at most, its own one included; None: no such limit
    max_num_sequences: int | None  # of a dense worker that it can keep at a time; None: as many as have blocks
    needs_every_block: bool  # whether a prefix can be continued only if each of its blocks is findable here

    def add_rows(self, num_new: int) -> None:
        """Adds empty rows."""

    def free_row(self, row: int) -> int:
        """Empties a row; returns how many blocks became free. What was findable stays findable."""

    # A new sequence

    def open_extra_rows(self, row: int, key: bytes, num_rows: int) -> bool:
        """The row's sequence reads so many extra rows, whose content `key` names. Returns whether they are here.

        A row that knows it already keeps what it has. Raises InvalidRequest for a number that is not possible.
        """

    def match(self, digests: Sequence[bytes]) -> int:
        """The greatest number of these first blocks after which a sequence can continue with what is findable here."""

    def adopt(self, row: int, digests: Sequence[bytes], num_offered: int, num_tokens: int) -> int:
        """Gives an empty row what it reads after the blocks of `digests`, which match.

        num_offered: blocks after which the groups before this one could continue; num_tokens: of the sequence.
        Returns how many blocks left the free ones.
        """

    def register(self, row: int, digests: Sequence[bytes], first: int) -> None:
        """Makes the committed content of a row findable. Only the digests from `first` on are new."""

    def num_to_fork(self, position: int) -> int:
        """Free blocks that `fork` takes."""

    def fork(self, row: int, other_row: int, position: int) -> list[tuple[int, int]]:
        """Gives an empty row what a row has up to `position`, where the row can continue. There is room for it.

        Returns the blocks to copy, (from, to).
        """

    # Going back

    def lack_at(self, row: int, position: int) -> str | None:
        """Why a row cannot continue from a position that it has computed; None: it can."""

    def is_shared(self, row: int, position: int) -> bool:
        """Whether others may read what the row would overwrite from `position` on."""

    def kept_length(self, row: int, length: int, num_hashed_blocks: int) -> int | None:
        """The greatest length up to `length` from which a row can continue without changing what others may find.

        None: there is none.
        """

    def go_back(self, row: int, position: int, num_hashed_blocks: int) -> None:
        """Forgets the content from `position` on, which will be overwritten. The row keeps its blocks."""

    def truncate(self, row: int, length: int, num_hashed_blocks: int) -> int:
        """The same, and releases the blocks behind that; returns how many became free."""

    # A step

    def plan_extra_rows(self, row: int, num_rows: int, orphans: Iterable[int]) -> None:
        """The step that is being planned writes the extra rows that the row reads.

        Room is made at the cost of the rows `orphans`. Raises CapacityError or InvalidRequest, and then the rows are
        written for nobody.
        """

    def evict(self, rows: SequenceRows) -> None:
        """Releases what no token after the committed ones of any row reads. Called at the beginning of every plan."""

    def evict_before(self, row: int, position: int) -> int:
        """Releases what no token from `position` on reads, as a plan demands; returns how many blocks became free."""

    def lacking(self, batch_rows: np.ndarray, positions: np.ndarray) -> Iterable[int]:
        """Indexes of `batch_rows` that cannot continue from their position, which is the end of what they have."""

    def num_missing(self, batch_rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """How many blocks each of `batch_rows` lacks for a step up to these lengths; not above 0: none."""

    def make_room(self, num_blocks: int, rows: SequenceRows, orphans: Iterable[int]) -> None:
        """Makes sure that so many blocks are free, at the cost of the rows `orphans` if need be.

        Raises CapacityError if there are too few.
        """

    def take(self, row: int, num_blocks: int) -> None:
        """Adds free blocks to a row. There is room for them."""

    def describe(self, batch: Batch, rows: SequenceRows, metadata: StepMetadata | None) -> StepMetadata:
        """Adds this group's part to the description of a step that the groups before it have made; None: the first."""

    def commit(self, step_rows: Sequence[int], rows: SequenceRows, sequences: Mapping[int, CachedSequence]) -> None:
        """The oldest described step has run. `step_rows`: its rows that still belong to the same sequences."""

    def abort(self) -> None:
        """No described step counts any more. Rows are truncated after that."""

    def check_integrity(self, sequences: Mapping[int, CachedSequence], rows: SequenceRows) -> None:
        """Counts everything again, `sequences` by row; raises AssertionError on any disagreement."""
