"""The sequences of the attention worker and the blocks of their keys and values.

Only the engine thread calls it: `plan_step`, then the layers run, then `commit_step` or `abort_steps`. Steps may be
planned while earlier ones still run, if the device runs all steps in order. The scheduler's count of free blocks is
updated by the deltas that these calls return.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from services.attn_worker.cache.block_pool import BlockPool, root_digest
from services.attn_worker.cache.cached_sequence import CachedSequence, InFlight, OpenResult, PlannedStep
from services.attn_worker.cache.layer_groups import LayerGroups
from services.attn_worker.cache.plan_errors import find_errors
from services.attn_worker.cache.prefix_cache import PrefixCache
from services.attn_worker.cache.rollback import Rollback
from services.attn_worker.cache.sequence_rows import NO_SEQUENCE
from services.attn_worker.cache.sequence_states import SequenceStates
from services.attn_worker.cache.window_group import WindowGroup
from services.common.errors import CapacityError, InvalidRequest, NotFound, RequestAborted, TwostrokeError
from services.common.kv_cache.retention import Retention
from services.step import Fork, PlanEntries, StepPlan


class KVCache:
    """Block tables and lengths of all sequences, one numpy row each. Sequences share prefixes in full blocks.

    `length_dependent_beyond`: the keys of longer prompts depend on the prompt's length
    (see `rope.length_dependent_beyond`) and share blocks only with prompts of equal length. `window`: no layer reads
    further back, except to the first `num_sink_tokens`, so sequences drop blocks between when a plan says so.
    `window_group`: some layers have a window and blocks of their own, which are dropped in every plan. All counts of
    blocks are about the other layers. `num_state_slots`: the model has gated delta layers, whose states have so many
    slots; it has no window then. None: it has no such layers.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        *,
        enable_prefix_cache: bool = True,
        length_dependent_beyond: int | None = None,
        window: int | None = None,
        num_sink_tokens: int = 0,
        window_group: WindowGroup | None = None,
        num_state_slots: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.retention = Retention(block_size, window, num_sink_tokens)
        self.window_group = window_group
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks  # also the index of the null block
        self.num_recovered_sequences = 0  # total number of sequences continued after their dense worker died
        self.num_recovered_tokens = 0  # total number of their tokens that were kept
        self._weights_hash = b""
        self._length_dependent_beyond = length_dependent_beyond
        self._sequences: dict[int, CachedSequence] = {}
        self._in_flight: deque[InFlight] = deque()  # planned steps, oldest first
        self._groups = LayerGroups(num_blocks, self.retention, window_group, -(-max_model_len // block_size))
        self._rows = self._groups.rows
        assert num_state_slots is None or (window is None and window_group is None), "states cannot drop tokens"
        self._states = None if num_state_slots is None else SequenceStates(num_state_slots, block_size)
        self._rollback = Rollback(self._groups, self._states, block_size)
        self._prefixes = PrefixCache(
            self._rows, self._groups.tables, self._states, block_size, is_enabled=enable_prefix_cache
        )
        self._sequence_of_row: dict[int, CachedSequence] = {}

    @property
    def num_free_blocks(self) -> int:
        return self._groups.main.pool.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks whose content a new sequence can still reuse."""
        return self._groups.main.pool.num_cached_blocks

    @property
    def num_used_blocks(self) -> int:
        return self._groups.main.pool.num_used_blocks

    @property
    def window_pool(self) -> BlockPool | None:
        """The blocks of the layers with a window, if these are a group."""
        return None if self._groups.windows is None else self._groups.windows.pool

    @property
    def state_pool(self) -> BlockPool | None:
        """The slots of the states of gated delta layers, if the model has any; cached ones are checkpoints."""
        return None if self._states is None else self._states.pool

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def held_blocks(self) -> dict[int, int]:
        """Number of blocks of every sequence, by seq_id; shared blocks count for each sequence."""
        num_held = self._groups.main.num_held_blocks.tolist()
        return {seq_id: num_held[sequence.row] for seq_id, sequence in self._sequences.items()}

    def use_weights(self, weights_hash: bytes) -> None:
        """Sets the weights that keys and values are computed with. If they are different, closes all sequences."""
        if weights_hash != self._weights_hash:
            self.close_sequences(list(self._sequences))
            self._weights_hash = weights_hash

    def open_sequence(
        self,
        seq_id: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        cache_salt: bytes = b"",
        ignores_prefix_cache: bool = False,
    ) -> OpenResult:
        """Starts a sequence on its longest cached prefix, or continues a known one from its committed tokens.

        At least the last token always remains to be computed. A known sequence (its dense worker died) keeps its blocks
        if `token_ids` agree with its tokens and it has dropped none that it needs again; otherwise it starts as a new
        one. With `ignores_prefix_cache` all tokens are computed, even of a known sequence. Raises InvalidRequest for
        impossible lengths.
        """
        if not 1 <= num_prompt_tokens <= len(token_ids) <= self.max_model_len:
            raise InvalidRequest(
                f"sequence {seq_id} has {len(token_ids)} tokens, {num_prompt_tokens} of them prompt;"
                f" 1 to max_model_len {self.max_model_len} are possible"
            )
        ids = array("I", token_ids)
        root = self._root(num_prompt_tokens, cache_salt)
        num_pinned = num_freed = 0
        sequence = self._sequences.get(seq_id)
        if sequence is None or ignores_prefix_cache or not _continues(sequence, root, ids):
            length = None
        else:
            length = self._rollback.kept_length(sequence, len(ids) - 1)
        if sequence is not None and length is not None:
            num_freed = self._rollback.truncate(sequence, length)
            sequence.token_ids, sequence.is_orphan = ids, False
            self.num_recovered_sequences += 1
            self.num_recovered_tokens += int(self._rows.num_computed[sequence.row])
        else:
            num_freed = self._drop(seq_id)
            sequence = self._sequences[seq_id] = self._new_sequence(root, ids)
            num_pinned = 0 if ignores_prefix_cache else self._prefixes.pin_longest(sequence)
        row = sequence.row
        self._rows.num_prompt_tokens[row] = num_prompt_tokens
        num_cached, num_held = int(self._rows.num_computed[row]), int(self._groups.main.num_held_blocks[row])
        return OpenResult(num_cached, num_pinned, num_held, num_freed)

    def plan_step(self, plan: StepPlan) -> PlannedStep:
        """Confirms tokens, closes, forks, rolls back, drops and allocates blocks for all entries, in this order.

        A sequence that cannot run is reported in `errors` and not changed. Tokens of unknown sequences are ignored.
        Raises InvalidRequest, and changes nothing, for an entry of no token or of more than max_model_len.
        """
        entries = plan.entries
        for index in np.flatnonzero((entries.num_tokens < 1) | (entries.num_tokens > self.max_model_len)).tolist():
            entry = entries[index]
            raise InvalidRequest(
                f"a step has {entry.num_tokens} tokens of sequence {entry.seq_id}, 1 to {self.max_model_len} are"
                " possible"
            )
        self._add_tokens(plan.confirmed)
        num_freed = self.close_sequences(plan.close_seq_ids)
        self._groups.drop_behind_windows()
        errors: dict[int, TwostrokeError] = {}
        copies = [pairs for fork in plan.forks if (pairs := self._fork(fork, errors))]
        self._add_tokens(plan.chosen)

        seq_ids, num_tokens, positions = entries.seq_ids.tolist(), entries.num_tokens, entries.positions
        lengths = positions + num_tokens
        rows = np.array([self._row(seq_id) for seq_id in seq_ids], np.int64)
        num_held = self._rows.num_computed[rows]
        found = find_errors(seq_ids, rows, num_held, num_tokens, positions, self.max_model_len)
        errors = found | errors  # a fork that failed says why its child is not open
        self._roll_back(seq_ids, rows, positions, errors)
        if plan.drops_blocks:
            pairs = zip(seq_ids, positions.tolist(), strict=True)
            num_freed += sum(self._drop_blocks(*pair) for pair in pairs if pair[0] not in errors)
        if self._states is not None:
            slots = self._states.take(seq_ids, rows, positions, self._rows.num_committed, self._orphans(), errors)
        self._allocate_blocks(seq_ids, rows, lengths, errors)

        has_failed = np.array([seq_id in errors for seq_id in seq_ids], bool)
        running = rows[~has_failed]
        self._rows.num_computed[running] = lengths[~has_failed]
        in_flight = self._note_in_flight(entries, seq_ids, lengths, errors)
        self._in_flight.append(in_flight)
        metadata = self._groups.metadata(rows, num_tokens, has_failed)
        if self._states is not None:
            states, checkpoints = self._states.begin_step(rows, positions, num_tokens, slots, has_failed)
            in_flight.checkpoints.extend(checkpoints)
            metadata = replace(metadata, states=states)
        return PlannedStep(
            metadata,
            [main for main, *_ in copies],
            [pair for _, *windows in copies for pair in windows],
            num_freed,
            errors,
        )

    def commit_step(self) -> None:
        """Commits the tokens of the oldest planned step, which has run; makes full blocks of known tokens findable."""
        step = self._in_flight.popleft()
        pairs = zip(step.sequences, step.lengths, strict=True)
        open_pairs = [(each.row, length) for each, length in pairs if self._sequence_of_row.get(each.row) is each]
        if open_pairs:
            open_rows, lengths = np.array(open_pairs, np.int64).T
            self._rows.num_committed[open_rows] = lengths
        rows = np.flatnonzero(self._rows.num_committed // self.block_size > self._rows.num_hashed_blocks)
        for row in rows.tolist():
            self._prefixes.register(self._sequence_of_row[row])
        if self._states is not None:
            self._states.commit(step, self._sequence_of_row, self._rows.num_committed)

    def abort_steps(self) -> int:
        """Drops all planned steps and returns to the last committed lengths. Returns num_freed_blocks.

        Forgets sequences that have dropped blocks that they would need again. The others wait for a dense worker.
        """
        planned = {id(sequence) for step in self._in_flight for sequence in step.sequences}
        if self._states is not None:
            self._states.drop([each for step in self._in_flight for each in step.checkpoints])
        self._in_flight.clear()
        num_freed = 0
        for seq_id, sequence in [each for each in self._sequences.items() if id(each[1]) in planned]:
            length = self._rollback.kept_length(sequence, self.max_model_len)
            num_freed += self._drop(seq_id) if length is None else self._rollback.truncate(sequence, length)
        for sequence in self._sequences.values():
            sequence.is_orphan = True
        return num_freed

    def close_sequences(self, seq_ids: Iterable[int]) -> int:
        """Forgets sequences; unknown ones are ignored. Returns how many blocks became free."""
        num_freed = 0
        for seq_id in seq_ids:
            if (sequence := self._sequences.get(seq_id)) is not None:
                self._prefixes.register(sequence)
                num_freed += self._drop(seq_id)
        return num_freed

    def check_integrity(self) -> None:
        """Counts everything again from the block tables; raises AssertionError on any disagreement."""
        used_rows = {sequence.row for sequence in self._sequences.values()}
        assert len(used_rows) == len(self._sequences) and used_rows == self._sequence_of_row.keys()
        self._rows.check_integrity(used_rows)
        assert self.num_free_blocks + self.num_used_blocks == self.num_blocks
        for sequence in self._sequences.values():
            num_hashed = int(self._rows.num_hashed_blocks[sequence.row])
            assert num_hashed * self.block_size <= self._rows.num_committed[sequence.row]
            assert sequence.digests == [self._prefixes.digest(sequence, index) for index in range(num_hashed)]
        if self._states is not None:
            lengths = {row: int(self._rows.num_computed[row]) for row in used_rows}
            self._states.check_integrity(lengths, [each for step in self._in_flight for each in step.checkpoints])
            for row, sequence in self._sequence_of_row.items():
                assert sequence.is_orphan or self._states.has(row, lengths[row])

    # Opening a sequence

    def _root(self, num_prompt_tokens: int, cache_salt: bytes) -> bytes:
        beyond = self._length_dependent_beyond
        is_length_dependent = beyond is not None and num_prompt_tokens > beyond
        return root_digest(self._weights_hash, cache_salt, num_prompt_tokens if is_length_dependent else None)

    def _new_sequence(self, root: bytes, token_ids: array[int]) -> CachedSequence:
        sequence = CachedSequence(self._rows.take(), root, token_ids, digests=[])
        self._sequence_of_row[sequence.row] = sequence
        return sequence

    def _drop(self, seq_id: int) -> int:
        """Forgets a sequence if it is known; returns how many blocks became free."""
        sequence = self._sequences.pop(seq_id, None)
        return 0 if sequence is None else self._free_row(sequence.row)

    def _free_row(self, row: int) -> int:
        del self._sequence_of_row[row]
        if self._states is not None:
            self._states.free(row)
        return self._rows.free(row)

    # Planning a step

    def _add_tokens(self, tokens: Iterable[tuple[int, int]]) -> None:
        for seq_id, token_id in tokens:
            if (sequence := self._sequences.get(seq_id)) is not None:
                sequence.token_ids.append(token_id)

    def _fork(self, fork: Fork, errors: dict[int, TwostrokeError]) -> list[tuple[int, int]]:
        """Creates a sequence with another's first tokens; returns the copies, by group, of a last, partial block."""
        parent, child_id = self._sequences.get(fork.parent_seq_id), fork.child_seq_id
        if parent is None:
            errors[child_id] = NotFound(f"sequence {fork.parent_seq_id}, to be forked, is not open")
            return []
        groups, rows = self._groups, self._rows
        num_computed = int(rows.num_computed[parent.row])
        has_position = 1 <= fork.position <= num_computed and groups.can_return(parent.row, fork.position)
        if self._states is not None:
            has_position = has_position and self._states.has(parent.row, fork.position)
        if child_id in self._sequences or not has_position:
            errors[child_id] = RequestAborted(
                f"sequence {fork.parent_seq_id} cannot be forked to {child_id} at token {fork.position}: it has"
                f" {num_computed} tokens, {groups.num_dropped_tokens(parent.row)} of them dropped, or no state there,"
                " and the other one must be new"
            )
            return []
        child = self._new_sequence(parent.root, parent.token_ids[: fork.position])
        row = child.row
        num_full, num_left = divmod(fork.position, self.block_size)
        groups.share_blocks(parent.row, row, num_full)
        try:
            self._add_blocks(row, [int(num_left > 0)] * len(groups.tables))
        except CapacityError as error:
            self._free_row(row)
            errors[child_id] = error
            return []
        if self._states is not None:
            self._states.fork(parent.row, row, fork.position)
        self._sequences[child_id] = child
        child.digests = parent.digests[:num_full]
        rows.num_prompt_tokens[row] = rows.num_prompt_tokens[parent.row]
        rows.num_computed[row] = fork.position
        rows.num_committed[row] = min(fork.position, int(rows.num_committed[parent.row]))
        rows.num_hashed_blocks[row] = len(child.digests)
        for step in self._in_flight:  # steps that the parent waits for also concern the child
            if parent in step.sequences:
                step.lengths.append(min(fork.position, step.lengths[step.sequences.index(parent)]))
                step.sequences.append(child)
        return groups.last_blocks(parent.row, row, num_full) if num_left else []

    def _note_in_flight(
        self, entries: PlanEntries, seq_ids: list[int], lengths: np.ndarray, errors: Collection[int]
    ) -> InFlight:
        num_kept = lengths.tolist()
        for index, drafts in entries.drafts.items():
            num_kept[index] -= len(drafts)
        if errors:
            has_run = [seq_id not in errors for seq_id in seq_ids]
            seq_ids, num_kept = list(compress(seq_ids, has_run)), list(compress(num_kept, has_run))
        return InFlight([self._sequences[seq_id] for seq_id in seq_ids], num_kept)

    def _row(self, seq_id: int) -> int:
        sequence = self._sequences.get(seq_id)
        return NO_SEQUENCE if sequence is None else sequence.row

    def _roll_back(
        self, seq_ids: list[int], rows: np.ndarray, positions: np.ndarray, errors: dict[int, TwostrokeError]
    ) -> None:
        """Forgets tokens beyond the plan's positions, such as rejected drafts. The sequences keep their blocks.

        Blocks that others may still read cannot be overwritten; that is an error of the sequence.
        """
        for index in np.flatnonzero(self._rows.num_computed[rows] > positions).tolist():
            if seq_ids[index] in errors:
                continue
            sequence = self._sequence_of_row[int(rows[index])]
            try:
                self._rollback.go_back(sequence, seq_ids[index], int(positions[index]))
            except RequestAborted as error:
                errors[seq_ids[index]] = error

    def _drop_blocks(self, seq_id: int, position: int) -> int:
        """Drops the blocks that no token from `position` on reads; returns how many became free."""
        return self._groups.main.drop_blocks(
            self._sequences[seq_id].row, self.retention.num_dropped_blocks(position)
        )

    def _allocate_blocks(
        self, seq_ids: list[int], rows: np.ndarray, lengths: np.ndarray, errors: dict[int, TwostrokeError]
    ) -> None:
        """Gives each sequence the blocks for `lengths` tokens; sequences that do not fit are added to `errors`."""
        for index, num_blocks in self._groups.missing_blocks(rows, lengths):
            if seq_ids[index] in errors:
                continue
            try:
                self._add_blocks(int(rows[index]), num_blocks)
            except CapacityError as error:
                errors[seq_ids[index]] = error

    def _add_blocks(self, row: int, num_blocks: list[int]) -> None:
        """Adds blocks of each group to a row, in the second one at the cost of orphans, if there are too few.

        That group has room for all sequences but these; one that a dense worker claims after that begins anew.
        """
        if self.window_group is not None:
            self._groups.drop_windows((each.row for each in self._orphans()), num_blocks[-1])
        self._groups.add_blocks(row, num_blocks)

    def _orphans(self) -> Iterator[CachedSequence]:
        return (each for each in self._sequences.values() if each.is_orphan)


def _continues(sequence: CachedSequence, root: bytes, token_ids: array[int]) -> bool:
    """Whether `token_ids` agree with the known tokens of `sequence`, which may be shorter or longer."""
    overlap = min(len(sequence.token_ids), len(token_ids))
    return sequence.root == root and sequence.token_ids[:overlap] == token_ids[:overlap]
