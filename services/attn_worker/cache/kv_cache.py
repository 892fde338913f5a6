"""The sequences of the attention worker and the blocks of their keys and values.

Only the engine thread calls it: `plan_step`, then the layers run, then `commit_step` or `abort_steps`. Steps may be
planned while earlier ones still run, if the device runs all steps in order. The scheduler's count of free blocks is
updated by the deltas that these calls return.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from services.attn_worker.cache.block_group import BlockGroup
from services.attn_worker.cache.block_pool import BlockPool
from services.attn_worker.cache.cached_sequence import (
    NO_SEQUENCE,
    CachedSequence,
    InFlight,
    OpenResult,
    PlannedStep,
    SequenceRows,
)
from services.attn_worker.cache.group import Batch, CacheGroup
from services.attn_worker.cache.prefix_cache import PrefixCache
from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.cache.step_spans import RopePositions, num_later_of_step, positions_of_step
from services.attn_worker.cache.tiers.tier import BlockSupplier, MissingBlock, NoTier, Tier
from services.common.errors import CapacityError, InvalidRequest, NotFound, RequestAborted, TwostrokeError
from services.step import Fork, NewSequence, StepPlan
from services.step.prompt_span import PromptSpan, check_spans


class KVCache:
    """Lengths of all sequences, one numpy row each, and the groups with what layers keep of them.

    Sequences share prefixes in full blocks. `main`: the group whose blocks the scheduler counts; `others`: those of
    further layers. `make_prefix_cache` takes the arguments of `PrefixCache` that have no default.
    """

    def __init__(
        self,
        main: BlockGroup,
        others: Sequence[CacheGroup],
        max_model_len: int,
        make_prefix_cache: Callable[..., PrefixCache] = PrefixCache,
    ) -> None:
        self.sliding_window = main.sliding_window
        self.block_size = main.sliding_window.block_size
        self.max_model_len = max_model_len
        self.num_blocks = main.pool.num_blocks  # also the index of the null block
        self.num_recovered_sequences = 0  # total number of sequences continued after their dense worker died
        self.num_recovered_tokens = 0  # total number of their tokens that were kept
        self._weights_hash = b""
        self._sequences: dict[int, CachedSequence] = {}
        self._row_of: dict[int, int] = {}  # by seq_id, as in their sequences
        self._sequence_of_row: dict[int, CachedSequence] = {}
        self._spans: dict[int, Sequence[PromptSpan]] = {}  # by row, of sequences with any in their prompts
        self._rope_positions: dict[int, RopePositions] = {}  # by row, of those with grids among them
        self._in_flight: deque[InFlight] = deque()  # planned steps, oldest first
        self._main = main
        self._groups: tuple[CacheGroup, ...] = (main, *others)
        self._rows = SequenceRows()
        self._prefixes = make_prefix_cache(self._rows, self._groups, self.block_size)
        self._add_rows()

    def use_tier(self, tier: Tier, *, copies_full_blocks: bool = True) -> None:
        """Has blocks copied to a tier, and continues prefixes by what is there. Called once, before any sequence.

        There must be one group only, without a window. `copies_full_blocks`: all of them, as soon as they are full;
        otherwise those of sequences that leave and come back.
        """
        assert self.can_load_blocks, "a tier has blocks of such a group alone"
        self._prefixes.use_tier(tier, copies_full_blocks=copies_full_blocks)

    @property
    def can_load_blocks(self) -> bool:
        """Whether full blocks are all that a sequence keeps, so that those of a prefix may come from elsewhere."""
        return len(self._groups) == 1 and self._main.needs_every_block

    @property
    def tier(self) -> Tier:
        """The tier below; one without any block if none is used."""
        return self._prefixes.tier

    @property
    def num_free_blocks(self) -> int:
        return self._main.pool.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks whose content a new sequence can still reuse."""
        return self._main.pool.num_cached_blocks

    @property
    def num_used_blocks(self) -> int:
        return self._main.pool.num_used_blocks

    @property
    def pools(self) -> Mapping[str, BlockPool]:
        """The blocks of each group, by its name."""
        return {group.name: group.pool for group in self._groups}

    @property
    def max_num_sequences(self) -> int | None:
        """How many sequences of a dense worker it keeps at a time; None: as many as have blocks."""
        limits = (group.max_num_sequences for group in self._groups)
        return min((each for each in limits if each is not None), default=None)

    @property
    def uncounted_window(self) -> int | None:
        """The shortest window of layers whose blocks are evicted without the scheduler; None: there are none such."""
        return min((group.window for group in self._groups[1:] if group.window is not None), default=None)

    @property
    def is_empty(self) -> bool:
        """Whether no block can be found, neither here nor in the tier."""
        return not (self._sequences or self.num_cached_blocks) and isinstance(self.tier, NoTier)

    @property
    def prefix_generation(self) -> int:
        """The highest generation so far, of a sequence or of `forget_prefixes`."""
        return self._prefixes.generation

    def forget_prefixes(self, generation: int) -> None:
        """No sequence that is opened from now on finds anything of those of a lower generation."""
        self._prefixes.use_generation(generation)

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def orphaned_blocks(self) -> dict[int, int]:
        """Number of blocks of every sequence, by seq_id; shared blocks count for each sequence."""
        num_held = self._main.num_held_blocks.tolist()
        return {seq_id: num_held[sequence.row] for seq_id, sequence in self._sequences.items()}

    def use_weights(self, weights_hash: bytes) -> None:
        """Sets the weights that keys and values are computed with. If they are different, closes all sequences."""
        if weights_hash != self._weights_hash:
            self.close_sequences(list(self._sequences))
            self._weights_hash = weights_hash
            self._prefixes.use_weights(weights_hash)

    def open_sequence(self, new: NewSequence, supplier: BlockSupplier | None = None) -> OpenResult:
        """Starts a sequence on its longest cached prefix, or continues a known one from its committed tokens.

        At least the last token always remains to be computed. A known sequence (its dense worker died) keeps its blocks
        if `token_ids` agree with its tokens and it has dropped none that it needs again; otherwise it starts as a new
        one. With `ignores_prefix_cache` all tokens are computed, even of a known sequence. From a higher
        `prefix_generation` on, no new sequence finds anything of earlier ones. The tier, or another `supplier`, may
        have some of the blocks (`missing`); if it cannot load one, close the sequence and open it again.
        Raises InvalidRequest for impossible lengths, and for spans that are not in the prompt in order.
        """
        seq_id, token_ids, num_prompt_tokens, spans = new.seq_id, new.token_ids, new.num_prompt_tokens, new.spans
        if not 1 <= num_prompt_tokens <= len(token_ids) <= self.max_model_len:
            raise InvalidRequest(
                f"sequence {seq_id} has {len(token_ids)} tokens, {num_prompt_tokens} of them prompt;"
                f" 1 to max_model_len {self.max_model_len} are possible"
            )
        check_spans(spans, num_prompt_tokens)
        ids = array("I", token_ids)
        most = 0 if new.starts_empty else len(ids) - 1
        if new.max_cached_tokens is not None:
            most = min(most, new.max_cached_tokens)
        self._prefixes.use_generation(new.prefix_generation)
        num_pinned = 0
        missing: tuple[MissingBlock, ...] = ()
        num_freed = self._go_on(new, ids, most)
        if num_freed is None:
            num_freed = self._drop(seq_id)
            generation = self._prefixes.generation
            root = self._prefixes.root(num_prompt_tokens, new.prefix_key, generation)
            sequence = self._new_sequence(seq_id, root, generation, ids, spans)
            if not new.ignores_prefix_cache:
                num_pinned = self._prefixes.pin_longest(sequence, most)
                num_taken, missing = self._prefixes.extend_from(supplier or self.tier, sequence, most, self._main)
                num_pinned += num_taken
            sequence.num_found_tokens = int(self._rows.num_computed[sequence.row])
        sequence, has_extra_rows = self._sequences[seq_id], True
        row = sequence.row
        if new.num_extra_rows:
            try:
                opened = [group.open_extra_rows(row, sequence.root, new.num_extra_rows) for group in self._groups]
                has_extra_rows = all(opened)
            except InvalidRequest:
                self._drop(seq_id)
                raise
        self._rows.num_prompt_tokens[row] = num_prompt_tokens
        num_cached, num_held = int(self._rows.num_computed[row]), int(self._main.num_held_blocks[row])
        num_recovered = max(0, num_cached - sequence.num_found_tokens)
        return OpenResult(
            seq_id,
            num_cached,
            num_pinned,
            num_held,
            num_freed,
            num_recovered,
            missing=missing,
            has_extra_rows=has_extra_rows,
        )

    def open_part(self, seq_id: int, tokens: range) -> OpenResult:
        """Keeps keys and values of these tokens of a sequence alone, in blocks that it takes at once.

        Raises InvalidRequest if only whole sequences are kept here, or for impossible tokens.
        """
        raise InvalidRequest(f"sequence {seq_id} is to be kept in part, this KV cache keeps whole sequences")

    def register_loaded(self, blocks: Iterable[MissingBlock]) -> None:
        """Makes blocks of an open sequence findable, whose content the tier has loaded."""
        for digest, block_id in blocks:
            self._main.pool.register_hash(block_id, digest)

    def plan_step(self, plan: StepPlan) -> PlannedStep:
        """Confirms tokens, closes, forks, rolls back, evicts and allocates blocks for all entries, in this order.

        A sequence that cannot run is reported in `errors` and not changed. Tokens of unknown sequences are ignored.
        Raises InvalidRequest, and changes nothing, for an entry of no token or of more than max_model_len.
        """
        entries = plan.entries
        is_impossible = (entries.num_tokens < 1) | (entries.num_tokens > self.max_model_len)
        for index in is_impossible.nonzero()[0].tolist():
            entry = entries[index]
            raise InvalidRequest(
                f"a step has {entry.num_tokens} tokens of sequence {entry.seq_id}, 1 to {self.max_model_len} are"
                " possible"
            )
        self._add_tokens(plan.sampled)
        for seq_id in plan.kept_seq_ids:
            if (kept := self._sequences.get(seq_id)) is not None:
                self.tier.offer(kept.digests, is_urgent=seq_id in plan.close_seq_ids)
        num_freed = self.close_sequences(plan.close_seq_ids)
        for group in self._groups:
            group.evict(self._rows)
        errors: dict[int, TwostrokeError] = {}
        forks = [self._fork(fork, errors) for fork in plan.forks]
        self._add_tokens(plan.forced)

        seq_ids, num_tokens, positions = entries.seq_ids.tolist(), entries.num_tokens, entries.positions
        lengths = positions + num_tokens
        row_of = self._row_of
        rows = np.array([row_of.get(seq_id, NO_SEQUENCE) for seq_id in seq_ids], np.int64)
        errors = self._find_errors(seq_ids, rows, positions, num_tokens) | errors  # a failed fork says more
        if plan.extra_rows:
            self._plan_extra_rows(plan.extra_rows, rows, errors)
        self._roll_back(seq_ids, rows, positions, errors)
        if plan.evicts_blocks:
            num_freed += self._evict_blocks(seq_ids, rows, positions, errors)
        self._allocate_blocks(seq_ids, rows, positions, lengths, errors)

        has_failed = np.zeros(len(entries), bool)
        running, kept_lengths = rows, lengths
        if entries.drafts:
            kept_lengths = lengths.copy()
            for index, drafts in entries.drafts.items():
                kept_lengths[index] -= len(drafts)
        if errors:
            has_failed = np.array([seq_id in errors for seq_id in seq_ids], bool)
            running, lengths, kept_lengths = rows[~has_failed], lengths[~has_failed], kept_lengths[~has_failed]
        self._rows.num_computed[running] = lengths
        self._in_flight.append(InFlight(running, self._rows.generations[running], kept_lengths))
        batch = Batch(rows, positions, num_tokens, has_failed)
        metadata: StepMetadata | None = None
        for group in self._groups:
            metadata = group.describe(batch, self._rows, metadata)
        assert metadata is not None, "there is at least one group"
        if self._spans:
            metadata = replace(
                metadata,
                rope_positions=positions_of_step(metadata.positions, batch, self._rope_positions),
                num_later=num_later_of_step(batch, self._spans),
            )
        copies = [[pair for fork in forks for pair in fork[group]] for group in range(len(self._groups))]
        return PlannedStep(metadata, copies, num_freed, errors)

    def commit_step(self) -> None:
        """Commits the tokens of the oldest planned step, which has run; makes full blocks of known tokens findable."""
        step = self._in_flight.popleft()
        is_open = self._rows.generations[step.rows] == step.generations
        rows = step.rows[is_open]
        self._rows.num_committed[rows] = step.lengths[is_open]
        has_full_block = self._rows.num_committed // self.block_size > self._rows.num_hashed_blocks
        for row in has_full_block.nonzero()[0].tolist():
            self._prefixes.register(self._sequence_of_row[row])
        step_rows = rows.tolist()
        for group in self._groups:
            group.commit(step_rows, self._rows, self._sequence_of_row)

    def abort_steps(self) -> int:
        """Drops all planned steps and returns to the last committed lengths. Returns num_freed_blocks.

        Forgets sequences that have dropped blocks that they would need again. The others wait for a dense worker.
        """
        planned: set[int] = set()
        for step in self._in_flight:
            planned.update(step.rows[self._rows.generations[step.rows] == step.generations].tolist())
        self._in_flight.clear()
        for group in self._groups:
            group.abort()
        num_freed = 0
        for seq_id, sequence in [each for each in self._sequences.items() if each[1].row in planned]:
            length = self._kept_length(sequence, self.max_model_len)
            num_freed += self._drop(seq_id) if length is None else self._truncate(sequence, length)
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
        assert self._row_of == {seq_id: sequence.row for seq_id, sequence in self._sequences.items()}
        used_rows = set(self._row_of.values())
        assert len(used_rows) == len(self._sequences) and used_rows == self._sequence_of_row.keys()
        self._rows.check_integrity(used_rows)
        assert self.num_free_blocks + self.num_used_blocks == self.num_blocks
        for sequence in self._sequences.values():
            num_hashed = int(self._rows.num_hashed_blocks[sequence.row])
            assert num_hashed * self.block_size <= self._rows.num_committed[sequence.row]
            assert sequence.digests == [self._prefixes.digest(sequence, index) for index in range(num_hashed)]
        for group in self._groups:
            group.check_integrity(self._sequence_of_row, self._rows)

    # Opening a sequence

    def _go_on(self, new: NewSequence, token_ids: array[int], most: int) -> int | None:
        """Continues a known sequence from its committed tokens, at most so many. Returns how many blocks became free;
        None: it is unknown, or has to start as a new one.
        """
        sequence = self._sequences.get(new.seq_id)
        if sequence is None or new.ignores_prefix_cache:
            return None
        root = self._prefixes.root(new.num_prompt_tokens, new.prefix_key, sequence.generation)
        if not _continues(sequence, root, token_ids, new.spans):
            return None
        if (length := self._kept_length(sequence, most)) is None:
            return None
        num_freed = self._truncate(sequence, length)
        sequence.token_ids, sequence.is_orphan = token_ids, False
        self.num_recovered_sequences += 1
        self.num_recovered_tokens += int(self._rows.num_computed[sequence.row])
        return num_freed

    def _new_sequence(
        self, seq_id: int, root: bytes, generation: int, token_ids: array[int], spans: Sequence[PromptSpan]
    ) -> CachedSequence:
        if self._rows.num_to_add:
            self._add_rows()
        sequence = CachedSequence(self._rows.take(), root, generation, token_ids, digests=[], spans=spans)
        self._sequences[seq_id], self._row_of[seq_id] = sequence, sequence.row
        self._sequence_of_row[sequence.row] = sequence
        if spans:
            self._spans[sequence.row] = spans
            if (positions := RopePositions.of(spans)) is not None:
                self._rope_positions[sequence.row] = positions
        return sequence

    def _drop(self, seq_id: int) -> int:
        """Forgets a sequence if it is known; returns how many blocks became free."""
        row = self._row_of.pop(seq_id, None)
        if row is None:
            return 0
        del self._sequences[seq_id]
        del self._sequence_of_row[row]
        self._spans.pop(row, None)
        self._rope_positions.pop(row, None)
        num_freed, *_ = [group.free_row(row) for group in self._groups]
        self._rows.free_row(row)
        return num_freed

    def _add_rows(self) -> None:
        num_new = self._rows.num_to_add
        self._rows.add_rows(num_new)
        for group in self._groups:
            group.add_rows(num_new)

    # Planning a step

    def _add_tokens(self, tokens: Iterable[tuple[int, int]]) -> None:
        for seq_id, token_id in tokens:
            if (sequence := self._sequences.get(seq_id)) is not None:
                sequence.token_ids.append(token_id)

    def _fork(self, fork: Fork, errors: dict[int, TwostrokeError]) -> list[list[tuple[int, int]]]:
        """Creates a sequence with another's first tokens; returns the blocks to copy, by group."""
        parent, child_id, position = self._sequences.get(fork.parent_seq_id), fork.child_seq_id, fork.position
        no_copies: list[list[tuple[int, int]]] = [[] for _ in self._groups]
        if parent is None:
            errors[child_id] = NotFound(f"sequence {fork.parent_seq_id}, to be forked, is not open")
            return no_copies
        rows, num_computed = self._rows, int(self._rows.num_computed[parent.row])
        reasons = [group.lack_at(parent.row, position) for group in self._groups]
        reason = next((each for each in reasons if each is not None), None)
        if not 1 <= position <= num_computed:
            reason = f"it has {num_computed} tokens"
        if child_id in self._sequences:
            reason = "the other one is open"
        if reason is not None:
            errors[child_id] = RequestAborted(
                f"sequence {fork.parent_seq_id} cannot be forked to {child_id} at token {position}: {reason}"
            )
            return no_copies
        try:
            for group in self._groups:
                group.make_room(group.num_to_fork(position), rows, self._orphans_beside(np.array([parent.row])))
        except CapacityError as error:
            errors[child_id] = error
            return no_copies
        child = self._new_sequence(child_id, parent.root, parent.generation, parent.token_ids[:position], parent.spans)
        row = child.row
        copies = [group.fork(parent.row, row, position) for group in self._groups]
        child.digests = parent.digests[: position // self.block_size]
        rows.num_prompt_tokens[row] = rows.num_prompt_tokens[parent.row]
        rows.num_computed[row] = position
        rows.num_committed[row] = min(position, int(rows.num_committed[parent.row]))
        rows.num_hashed_blocks[row] = len(child.digests)
        for step in self._in_flight:  # steps that the parent waits for also concern the child
            is_parent = (step.rows == parent.row) & (step.generations == rows.generations[parent.row])
            if is_parent.any():
                step.rows = np.append(step.rows, row)
                step.generations = np.append(step.generations, rows.generations[row])
                step.lengths = np.append(step.lengths, min(position, int(step.lengths[is_parent][0])))
        return copies

    def _plan_extra_rows(
        self, extra_rows: Iterable[tuple[int, int]], rows: np.ndarray, errors: dict[int, TwostrokeError]
    ) -> None:
        """Finds where the step's extra rows go."""
        for seq_id, num_rows in extra_rows:
            for group in self._groups:
                try:
                    group.plan_extra_rows(self._row_of.get(seq_id, NO_SEQUENCE), num_rows, self._orphans_beside(rows))
                except (CapacityError, InvalidRequest) as error:
                    errors[seq_id] = error

    def _find_errors(
        self, seq_ids: list[int], rows: np.ndarray, positions: np.ndarray, num_tokens: np.ndarray
    ) -> dict[int, TwostrokeError]:
        """The entries that contradict the cache, found by one vectorised check; messages are built only on failure."""
        num_computed = self._rows.num_computed[rows]
        is_wrong = (rows == NO_SEQUENCE) | (num_computed < positions)
        is_wrong |= positions + num_tokens > self.max_model_len
        if len(set(seq_ids)) < len(seq_ids):
            is_wrong |= np.array([seq_ids.count(seq_id) > 1 for seq_id in seq_ids])
        errors: dict[int, TwostrokeError] = {}
        for index in is_wrong.nonzero()[0].tolist():
            seq_id = seq_ids[index]
            if rows[index] == NO_SEQUENCE:
                errors.setdefault(seq_id, NotFound(f"sequence {seq_id} is not open"))
            else:
                errors[seq_id] = RequestAborted(
                    f"{seq_ids.count(seq_id)} entries of a step plan {num_tokens[index]} tokens after"
                    f" {positions[index]} for sequence {seq_id}; it has {num_computed[index]} tokens,"
                    f" max_model_len is {self.max_model_len}"
                )
        return errors

    def _roll_back(
        self, seq_ids: list[int], rows: np.ndarray, positions: np.ndarray, errors: dict[int, TwostrokeError]
    ) -> None:
        """Forgets tokens beyond the plan's positions, such as rejected drafts. The sequences keep their blocks.

        Blocks that others may still read cannot be overwritten; that is an error of the sequence.
        """
        for index in (self._rows.num_computed[rows] > positions).nonzero()[0].tolist():
            if seq_ids[index] in errors:
                continue
            sequence = self._sequence_of_row[int(rows[index])]
            try:
                self._go_back(sequence, seq_ids[index], int(positions[index]))
            except RequestAborted as error:
                errors[seq_ids[index]] = error

    def _evict_blocks(
        self, seq_ids: list[int], rows: np.ndarray, positions: np.ndarray, errors: Mapping[int, TwostrokeError]
    ) -> int:
        """Evicts the blocks that the entries' tokens and later ones do not read; returns how many became free."""
        num_freed = 0
        for seq_id, row, position in zip(seq_ids, rows.tolist(), positions.tolist(), strict=True):
            if seq_id not in errors:
                of_groups = [group.evict_before(row, position) for group in self._groups]
                num_freed += of_groups[0]
        return num_freed

    def _allocate_blocks(
        self,
        seq_ids: list[int],
        rows: np.ndarray,
        positions: np.ndarray,
        lengths: np.ndarray,
        errors: dict[int, TwostrokeError],
    ) -> None:
        """Gives each sequence the blocks for `lengths` tokens in all groups.

        Sequences that do not fit get none, and are added to `errors`.
        """
        for group in self._groups:
            for index in group.lacking(rows, positions):
                seq_id, position = seq_ids[index], int(positions[index])
                if seq_id not in errors:
                    reason = group.lack_at(int(rows[index]), position)
                    errors[seq_id] = RequestAborted(f"sequence {seq_id} cannot go on from token {position}: {reason}")
        num_missing = [group.num_missing(rows, lengths) for group in self._groups]
        is_short = num_missing[0] > 0
        for each in num_missing[1:]:
            is_short |= each > 0
        for index in is_short.nonzero()[0].tolist():
            if seq_ids[index] in errors:
                continue
            row, needed = int(rows[index]), [max(0, int(each[index])) for each in num_missing]
            try:
                for group, num_blocks in zip(self._groups, needed, strict=True):
                    group.make_room(num_blocks, self._rows, self._orphans_beside(rows))
            except CapacityError as error:
                errors[seq_ids[index]] = error
                continue
            for group, num_blocks in zip(self._groups, needed, strict=True):
                if num_blocks:
                    group.take(row, num_blocks)

    def _orphans_beside(self, rows: np.ndarray) -> Iterator[int]:
        """The rows of sequences that nobody has claimed, without these."""
        used = set(rows.tolist())
        yield from (each.row for each in self._sequences.values() if each.is_orphan and each.row not in used)

    # Going back to an earlier length

    def _go_back(self, sequence: CachedSequence, seq_id: int, position: int) -> None:
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

    def _kept_length(self, sequence: CachedSequence, most: int) -> int | None:
        """The length that the sequence can go back to in all groups: of its committed tokens, at most `most`.

        None: there is none.
        """
        row = sequence.row
        length = min(int(self._rows.num_committed[row]), most)
        while True:
            kept: int | None = length
            for group in self._groups:
                kept = group.kept_length(row, kept, len(sequence.digests))
                if kept is None:
                    return None
            if kept == length:
                return length
            length = kept

    def _truncate(self, sequence: CachedSequence, length: int) -> int:
        """Goes back to a `_kept_length`; returns how many blocks became free."""
        num_hashed_blocks = len(sequence.digests)
        num_freed, *_ = [group.truncate(sequence.row, length, num_hashed_blocks) for group in self._groups]
        self._set_length(sequence, length, length)
        return num_freed

    def _set_length(self, sequence: CachedSequence, num_computed: int, num_committed: int) -> None:
        row = sequence.row
        del sequence.digests[num_computed // self.block_size :]
        self._rows.num_hashed_blocks[row] = len(sequence.digests)
        self._rows.num_computed[row], self._rows.num_committed[row] = num_computed, num_committed


def _continues(
    sequence: CachedSequence, root: bytes, token_ids: array[int], spans: Sequence[PromptSpan]
) -> bool:
    """Whether `token_ids` agree with the known tokens of `sequence`, which may be shorter or longer."""
    overlap = min(len(sequence.token_ids), len(token_ids))
    is_same = sequence.root == root and tuple(sequence.spans) == tuple(spans)
    return is_same and sequence.token_ids[:overlap] == token_ids[:overlap]
