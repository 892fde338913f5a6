"""KVCache with events in any order, and a simulation of the memory's contents.

For every slot the simulated memory stores all tokens from which the slot's key was computed. If a sequence ever
reads a slot with other tokens, a block was shared, evicted or overwritten wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.cache.cached_sequence import PlannedStep
from services.attn_worker.cache.step_metadata import StepMetadata
from services.common.errors import CapacityError, NotFound, RequestAborted
from tests.support.attention.open_now import open_sequence
from tests.support.examples import examples
from tests.support.plans import make_plan

MAX_MODEL_LEN = 30
TOKENS = st.integers(0, 1)
# Prompts with few different beginnings and short endings, so that prefixes are often shared.
PROMPTS = st.builds(
    lambda token, length, tail: [token] * length + tail,
    TOKENS,
    st.integers(0, 12),
    st.lists(TOKENS, min_size=1, max_size=3),
)
History = tuple[object, ...]


@dataclass
class Sequence:
    tokens: list[int]  # all tokens, also those that the cache does not know yet
    num_prompt: int
    salt: bytes
    num_known: int
    num_computed: int  # number of `tokens`; the cache may also contain wrong drafts
    num_committed: int  # the length after a lost step
    num_held: int  # number of blocks
    num_dropped: int  # number of its blocks behind the sinks that are gone


class KVCacheMachine(RuleBasedStateMachine):
    """Requests arrive, run in chunks or one by one, end, crash and are resubmitted."""

    make_cache = staticmethod(build_cache)

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.sampled_from([1, 2, 4]),
        has_prefix_cache=st.sampled_from([True, True, True, False]),
        beyond=st.sampled_from([None, None, 6]),
        window=st.sampled_from([None, None, 1, 4, 7]),
        num_sinks=st.sampled_from([0, 0, 1, 3]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        has_prefix_cache: bool,
        beyond: int | None,
        window: int | None,
        num_sinks: int,
    ) -> None:
        num_sinks = num_sinks if window is not None else 0
        self.cache = self.make_cache(
            num_blocks,
            block_size,
            MAX_MODEL_LEN,
            enable_prefix_cache=has_prefix_cache,
            length_dependent_beyond=beyond,
            window=window,
            num_sink_tokens=num_sinks,
        )
        self.num_sinks, self.num_sink_blocks = num_sinks, -(-num_sinks // block_size)
        self.has_prefix_cache, self.beyond, self.window = has_prefix_cache, beyond, window
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_free = num_blocks  # the scheduler's ledger, updated only by differences
        self.memory: dict[int, History] = {}
        self.sequences: dict[int, Sequence] = {}
        self.next_seq_id = 0

    def history(self, sequence: Sequence, length: int) -> History:
        is_long = self.beyond is not None and sequence.num_prompt > self.beyond
        root = (sequence.salt, sequence.num_prompt if is_long else None)
        return (root, *sequence.tokens[:length])

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_unread(self, position: int) -> int:
        """Number of blocks behind the sinks all of whose tokens lie before the window of the token at `position`."""
        if self.window is None:
            return 0
        return max(0, max(0, position + 1 - self.window) // self.block_size - self.num_sink_blocks)

    @rule(tokens=PROMPTS, salt=st.sampled_from([b"", b"", b"salt"]))
    def open(self, tokens: list[int], salt: bytes) -> None:
        result = open_sequence(self.cache, self.next_seq_id, tokens, len(tokens), salt)
        assert result.num_freed_blocks == 0
        num_dropped = self.num_unread(result.num_cached_tokens)
        assert result.num_cached_tokens == (num_dropped + result.num_held_blocks) * self.block_size < len(tokens)
        assert result.num_pinned_blocks <= result.num_held_blocks
        assert self.has_prefix_cache or result.num_cached_tokens == 0
        self.num_free -= result.num_pinned_blocks
        self.sequences[self.next_seq_id] = Sequence(
            list(tokens),
            len(tokens),
            salt,
            num_known=len(tokens),
            num_computed=result.num_cached_tokens,
            num_committed=result.num_cached_tokens,
            num_held=result.num_held_blocks,
            num_dropped=num_dropped,
        )
        self.next_seq_id += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), is_lost=st.sampled_from([False, False, False, True]))
    def step(self, data: st.DataObject, is_lost: bool) -> None:
        closed = data.draw(st.lists(st.sampled_from(sorted(self.sequences)), unique=True, max_size=1))
        sampled = self.draw_sampled(data)
        running = [
            seq_id
            for seq_id, sequence in self.sequences.items()
            if seq_id not in closed and sequence.num_computed < MAX_MODEL_LEN
        ]
        drops = self.window is not None and data.draw(st.booleans())
        forks = [] if drops else self.draw_forks(data, closed)
        batch = data.draw(st.lists(st.sampled_from(running), unique=True)) if running else []
        drafts: dict[int, tuple[int, ...]] = {}
        entries = [(seq_id, *self.draw_advance(data, seq_id, drafts)) for seq_id in batch]
        bogus = data.draw(st.sampled_from([None, None, "unknown", "count"]))
        if bogus == "unknown":
            entries.insert(data.draw(st.integers(0, len(entries))), (999, 2, 0))
        elif bogus == "count" and entries:
            seq_id, num_tokens, _ = entries[0]
            entries[0] = (seq_id, num_tokens, MAX_MODEL_LEN)  # beyond its length

        forced = self.draw_forced(data, forks)
        plan = make_plan(entries, closed, sampled, forks, drafts, forced)
        planned = self.cache.plan_step(replace(plan, evicts_blocks=drops))

        for seq_id in closed:
            del self.sequences[seq_id]
        self.num_free += planned.num_freed_blocks
        self.apply_forks(forks, planned, forced)
        advanced = {}
        for seq_id, num_tokens, position in entries:
            sequence = self.sequences.get(seq_id)
            if sequence is None:
                assert isinstance(planned.errors[seq_id], NotFound)
            elif position != sequence.num_computed:
                assert isinstance(planned.errors[seq_id], RequestAborted)
            else:
                if drops:
                    num_kept = sequence.num_dropped + sequence.num_held
                    sequence.num_dropped = max(sequence.num_dropped, self.num_unread(position) - 1)
                    sequence.num_held = num_kept - sequence.num_dropped
                num_kept = sequence.num_dropped + sequence.num_held
                needed = max(0, self.num_blocks_for(position + num_tokens) - num_kept)
                if needed > self.num_free:
                    assert isinstance(planned.errors[seq_id], CapacityError)
                else:
                    assert seq_id not in planned.errors
                    self.num_free -= needed
                    sequence.num_held += needed
                    advanced[seq_id] = position + num_tokens - len(drafts.get(seq_id, ()))
        self.run_on_memory(planned.metadata, entries, advanced, drafts, is_lost)
        if is_lost:
            self.num_free += self.cache.abort_steps()
            for seq_id in advanced:
                sequence = self.sequences[seq_id]
                sequence.num_computed = sequence.num_committed
                sequence.num_held = self.num_blocks_for(sequence.num_computed) - sequence.num_dropped
                if sequence.num_dropped > self.num_unread(sequence.num_committed):
                    del self.sequences[seq_id]  # it would read blocks that it has dropped
            return
        self.cache.commit_step()
        for seq_id, length in advanced.items():
            sequence, guesses = self.sequences[seq_id], drafts.get(seq_id, ())
            num_right = data.draw(st.integers(0, len(guesses)))
            sequence.tokens += guesses[:num_right]
            sequence.num_computed, sequence.num_committed = length + num_right, length

    def draw_forks(self, data: st.DataObject, closed: list[int]) -> list[tuple[int, int, int]]:
        """Draws a fork (parent, child, position) of a computed sequence, or none."""
        parents = [
            seq_id for seq_id, each in self.sequences.items() if seq_id not in closed and each.num_computed > 0
        ]
        if not parents or not data.draw(st.sampled_from([False, False, False, True])):
            return []
        parent = data.draw(st.sampled_from(parents))
        sequence = self.sequences[parent]
        last_of_prompt = max(1, min(sequence.num_prompt - 1, sequence.num_computed))  # for another answer to the prompt
        self.next_seq_id += 1
        has_all = sequence.num_dropped <= self.num_unread(last_of_prompt)
        position = data.draw(st.sampled_from([sequence.num_computed, *([last_of_prompt] if has_all else [])]))
        return [(parent, self.next_seq_id - 1, position)]

    def draw_forced(self, data: st.DataObject, forks: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
        """The token after a fork, if those before are known: the rest of the prompt, or a new one."""
        forced = []
        for parent_id, child_id, position in forks:
            parent = self.sequences[parent_id]
            if position < parent.num_prompt:
                forced += [(child_id, token_id) for token_id in parent.tokens[position : parent.num_prompt]]
            elif parent.num_known >= position and data.draw(st.booleans()):
                forced.append((child_id, data.draw(TOKENS)))
        return forced

    def apply_forks(
        self, forks: list[tuple[int, int, int]], planned: PlannedStep, forced: list[tuple[int, int]]
    ) -> None:
        """Copies the blocks in the simulated memory. Without a free block only the child must fail."""
        [copies] = planned.block_copies
        for parent_id, child_id, position in forks:
            has_part = position % self.block_size > 0
            if has_part and self.num_free == 0:
                assert isinstance(planned.errors[child_id], CapacityError)
                continue
            parent, own_tokens = self.sequences[parent_id], [token_id for _, token_id in forced]
            self.sequences[child_id] = replace(
                parent,
                tokens=parent.tokens[:position] + own_tokens,
                num_known=min(parent.num_known, position) + len(own_tokens),
                num_computed=position,
                num_committed=min(position, parent.num_committed),
                num_held=self.num_blocks_for(position) - parent.num_dropped,
            )
            self.num_free -= has_part
            for source, target in [copies.pop(0)] if has_part else []:
                for offset in range(self.block_size):
                    history = self.memory.get(source * self.block_size + offset, ("nothing",))
                    self.memory[target * self.block_size + offset] = history
        assert not copies

    def draw_sampled(self, data: st.DataObject) -> list[tuple[int, int]]:
        sampled = []
        for seq_id, sequence in self.sequences.items():
            if sequence.num_known < len(sequence.tokens) and data.draw(st.booleans()):
                sampled.append((seq_id, sequence.tokens[sequence.num_known]))
                sequence.num_known += 1
        return sampled

    def draw_advance(
        self, data: st.DataObject, seq_id: int, drafts: dict[int, tuple[int, ...]]
    ) -> tuple[int, int]:
        """Draws (num_tokens, position), and new unknown tokens for the sequence if it needs them. Adds drafts."""
        sequence = self.sequences[seq_id]
        left = len(sequence.tokens) - sequence.num_computed
        if left == 0:
            sequence.tokens.append(data.draw(TOKENS))
            left = 1
        num_tokens, position = data.draw(st.integers(1, left)), sequence.num_computed
        if num_tokens == left:
            most = min(3, MAX_MODEL_LEN - position - num_tokens)
            drafts[seq_id] = tuple(data.draw(st.lists(TOKENS, max_size=most)))
            num_tokens += len(drafts[seq_id])
        return num_tokens, position

    def run_on_memory(
        self,
        step: StepMetadata,
        entries: list[tuple[int, int, int]],
        advanced: dict[int, int],
        drafts: dict[int, tuple[int, ...]],
        is_lost: bool,
    ) -> None:
        """Writes every row's tokens to its slot, then checks all slots that each sequence reads."""
        row = 0
        null_slots = range(self.num_blocks * self.block_size, (self.num_blocks + 1) * self.block_size)
        assert step.num_tokens.tolist() == [num_tokens for _, num_tokens, _ in entries]
        for seq_id, num_tokens, num_computed in entries:
            slots = step.slot_mapping[row : row + num_tokens].tolist()
            positions = step.positions[row : row + num_tokens].tolist()
            rope_lens = step.rope_lens[row : row + num_tokens]
            row += num_tokens
            if seq_id not in advanced:
                assert set(slots) <= set(null_slots)
                continue
            sequence = self.with_drafts(seq_id, drafts)
            assert positions == list(range(num_computed, num_computed + num_tokens))
            assert (rope_lens == np.maximum(np.array(positions) + 1, sequence.num_prompt)).all()
            for slot, position in zip(slots, positions, strict=True):
                assert slot not in null_slots
                self.memory[slot] = ("garbage",) if is_lost else self.history(sequence, position + 1)
        assert row == len(step.slot_mapping)
        for index, (seq_id, num_tokens, num_computed) in enumerate(entries):
            if seq_id not in advanced or is_lost:
                continue
            context_len, num_dropped = num_computed + num_tokens, self.sequences[seq_id].num_dropped
            assert step.context_lens[index] == context_len - num_dropped * self.block_size
            first_read = 0 if self.window is None else max(0, num_computed + 1 - self.window)
            for position in [*range(min(self.num_sinks, first_read)), *range(first_read, context_len)]:
                place = position // self.block_size
                place -= num_dropped if place >= self.num_sink_blocks else 0
                block = int(step.block_tables[index, place])
                slot = block * self.block_size + position % self.block_size
                assert self.memory[slot] == self.history(self.with_drafts(seq_id, drafts), position + 1)

    def with_drafts(self, seq_id: int, drafts: dict[int, tuple[int, ...]]) -> Sequence:
        sequence = self.sequences[seq_id]
        return replace(sequence, tokens=[*sequence.tokens, *drafts.get(seq_id, ())])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), has_changed=st.sampled_from([False, False, False, True]))
    def resubmit(self, data: st.DataObject, has_changed: bool) -> None:
        """The dense worker died. The gateway resubmits a prefix of the tokens, or others (real ones never do)."""
        seq_id = data.draw(st.sampled_from(sorted(self.sequences)))
        sequence = self.sequences[seq_id]
        length = data.draw(st.integers(sequence.num_prompt, len(sequence.tokens)))
        tokens = sequence.tokens[:length]
        disagrees = False
        if has_changed:
            changed = data.draw(st.integers(0, length - 1))
            tokens[changed] += 2
            disagrees = changed < sequence.num_known
        result = open_sequence(self.cache, seq_id, tokens, sequence.num_prompt, sequence.salt)
        kept = min(sequence.num_committed, length - 1)
        starts_anew = disagrees or sequence.num_dropped > self.num_unread(kept)
        if not starts_anew and sequence.num_dropped > self.num_unread(kept // self.block_size * self.block_size):
            starts_anew = result.num_held_blocks != self.num_blocks_for(kept) - sequence.num_dropped  # others share
        if starts_anew:
            assert result.num_cached_tokens < length and result.num_cached_tokens % self.block_size == 0
        else:
            assert result.num_cached_tokens in (kept, kept // self.block_size * self.block_size)
            assert result.num_pinned_blocks == 0
            if kept == sequence.num_committed:
                assert result.num_cached_tokens == kept
                num_left = self.num_blocks_for(kept) - sequence.num_dropped
                assert result.num_freed_blocks <= sequence.num_held - num_left, "some may be shared"
        if has_changed and not starts_anew:
            # The cache did not know the old tokens, so it must trust the journal.
            self.rewrite_memory(sequence, tokens, result.num_cached_tokens)
        if starts_anew:
            sequence.num_dropped = self.num_unread(result.num_cached_tokens)
        assert result.num_held_blocks == self.num_blocks_for(result.num_cached_tokens) - sequence.num_dropped
        self.num_free += result.num_freed_blocks - result.num_pinned_blocks
        sequence.tokens = tokens
        sequence.num_known, sequence.num_held = length, result.num_held_blocks
        sequence.num_computed = sequence.num_committed = result.num_cached_tokens

    def rewrite_memory(self, sequence: Sequence, tokens: list[int], num_tokens: int) -> None:
        old = {self.history(sequence, length): length for length in range(1, num_tokens + 1)}
        new = replace(sequence, tokens=tokens)
        for slot, history in self.memory.items():
            if old.get(history, 0) > sequence.num_known:
                self.memory[slot] = self.history(new, old[history])

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        cache.check_integrity()
        assert cache.num_free_blocks == self.num_free
        assert cache.num_free_blocks + cache.num_used_blocks == self.num_blocks
        assert cache.num_sequences == len(self.sequences)
        expected = {s: q.num_held for s, q in self.sequences.items()}
        assert cache.orphaned_blocks == expected

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close_sequences(list(self.sequences))
            self.cache.check_integrity()
            assert self.cache.num_free_blocks == self.num_blocks and self.cache.num_sequences == 0


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
