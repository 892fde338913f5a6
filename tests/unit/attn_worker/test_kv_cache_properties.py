"""KVCache under any order of events, with the cache's physical content simulated beside it.

The simulated memory remembers, for every slot, the whole token history its key was computed from. If a
sequence ever reads a slot with another history, a block was shared, evicted or overwritten wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.attn_worker.kv_cache import KVCache
from services.attn_worker.step_metadata import StepMetadata
from services.common.errors import CapacityError, NotFound, RequestAborted
from tests.plans import make_plan

MAX_MODEL_LEN = 30
TOKENS = st.integers(0, 1)
# Few beginnings and short endings, so that prefixes are often shared.
PROMPTS = st.builds(
    lambda token, length, tail: [token] * length + tail,
    TOKENS,
    st.integers(0, 12),
    st.lists(TOKENS, min_size=1, max_size=3),
)
History = tuple[object, ...]


@dataclass
class Sequence:
    tokens: list[int]  # all that exist, whether the cache knows them or not
    num_prompt: int
    salt: bytes
    num_known: int
    num_computed: int


class KVCacheMachine(RuleBasedStateMachine):
    """Requests come, run in chunks or one by one, end, crash and come back."""

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.sampled_from([1, 2, 4]),
        has_prefix_cache=st.sampled_from([True, True, True, False]),
        beyond=st.sampled_from([None, None, 6]),
    )
    def start(self, num_blocks: int, block_size: int, has_prefix_cache: bool, beyond: int | None) -> None:
        self.cache = KVCache(
            num_blocks,
            block_size,
            MAX_MODEL_LEN,
            enable_prefix_cache=has_prefix_cache,
            length_dependent_beyond=beyond,
        )
        self.has_prefix_cache, self.beyond = has_prefix_cache, beyond
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_free = num_blocks  # the scheduler's ledger, kept by deltas only
        self.memory: dict[int, History] = {}
        self.sequences: dict[int, Sequence] = {}
        self.next_seq_id = 0

    def history(self, sequence: Sequence, length: int) -> History:
        is_long = self.beyond is not None and sequence.num_prompt > self.beyond
        root = (sequence.salt, sequence.num_prompt if is_long else None)
        return (root, *sequence.tokens[:length])

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @rule(tokens=PROMPTS, salt=st.sampled_from([b"", b"", b"salt"]))
    def open(self, tokens: list[int], salt: bytes) -> None:
        result = self.cache.open_sequence(self.next_seq_id, tokens, len(tokens), salt)
        assert result.num_freed_blocks == 0
        assert result.num_cached_tokens == result.num_held_blocks * self.block_size < len(tokens)
        assert result.num_pinned_blocks <= result.num_held_blocks
        assert self.has_prefix_cache or result.num_cached_tokens == 0
        self.num_free -= result.num_pinned_blocks
        self.sequences[self.next_seq_id] = Sequence(
            list(tokens), len(tokens), salt, len(tokens), result.num_cached_tokens
        )
        self.next_seq_id += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), is_lost=st.sampled_from([False, False, False, True]))
    def step(self, data: st.DataObject, is_lost: bool) -> None:
        closed = data.draw(st.lists(st.sampled_from(sorted(self.sequences)), unique=True, max_size=1))
        confirmed = self.draw_confirmed(data)
        running = [
            seq_id
            for seq_id, sequence in self.sequences.items()
            if seq_id not in closed and sequence.num_computed < MAX_MODEL_LEN
        ]
        batch = data.draw(st.lists(st.sampled_from(running), unique=True)) if running else []
        entries = [(seq_id, *self.draw_advance(data, seq_id)) for seq_id in batch]
        bogus = data.draw(st.sampled_from([None, None, "unknown", "count"]))
        if bogus == "unknown":
            entries.insert(data.draw(st.integers(0, len(entries))), (999, 2, 0))
        elif bogus == "count" and entries:
            seq_id, num_tokens, num_computed = entries[0]
            entries[0] = (seq_id, num_tokens, num_computed + 1)

        planned = self.cache.plan_step(make_plan(entries, closed, confirmed))

        for seq_id in closed:
            del self.sequences[seq_id]
        self.num_free += planned.num_freed_blocks
        advanced = {}
        for seq_id, num_tokens, num_computed in entries:
            sequence = self.sequences.get(seq_id)
            if sequence is None:
                assert isinstance(planned.errors[seq_id], NotFound)
            elif num_computed != sequence.num_computed:
                assert isinstance(planned.errors[seq_id], RequestAborted)
            else:
                needed = self.num_blocks_for(num_computed + num_tokens) - self.num_blocks_for(num_computed)
                if needed > self.num_free:
                    assert isinstance(planned.errors[seq_id], CapacityError)
                else:
                    assert seq_id not in planned.errors
                    self.num_free -= needed
                    advanced[seq_id] = num_tokens
        self.run_on_memory(planned.metadata, entries, advanced, is_lost)
        if is_lost:
            self.num_free += self.cache.abort_steps()
        else:
            self.cache.commit_step()
            for seq_id, num_tokens in advanced.items():
                self.sequences[seq_id].num_computed += num_tokens

    def draw_confirmed(self, data: st.DataObject) -> list[tuple[int, int]]:
        confirmed = []
        for seq_id, sequence in self.sequences.items():
            if sequence.num_known < len(sequence.tokens) and data.draw(st.booleans()):
                confirmed.append((seq_id, sequence.tokens[sequence.num_known]))
                sequence.num_known += 1
        return confirmed

    def draw_advance(self, data: st.DataObject, seq_id: int) -> tuple[int, int]:
        """(num_tokens, num_computed_tokens); the tokens up to there come into being, unconfirmed."""
        sequence = self.sequences[seq_id]
        left = len(sequence.tokens) - sequence.num_computed
        if left == 0:
            sequence.tokens.append(data.draw(TOKENS))
            left = 1
        return data.draw(st.integers(1, left)), sequence.num_computed

    def run_on_memory(
        self,
        step: StepMetadata,
        entries: list[tuple[int, int, int]],
        advanced: dict[int, int],
        is_lost: bool,
    ) -> None:
        """Write every row's history to its slot, then let every sequence read all it attends to."""
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
            sequence = self.sequences[seq_id]
            assert positions == list(range(num_computed, num_computed + num_tokens))
            assert (rope_lens == np.maximum(np.array(positions) + 1, sequence.num_prompt)).all()
            for slot, position in zip(slots, positions, strict=True):
                assert slot not in null_slots
                self.memory[slot] = ("garbage",) if is_lost else self.history(sequence, position + 1)
        assert row == len(step.slot_mapping)
        for index, (seq_id, num_tokens, num_computed) in enumerate(entries):
            if seq_id not in advanced or is_lost:
                continue
            context_len = num_computed + num_tokens
            assert step.context_lens[index] == context_len
            for position in range(context_len):
                block = int(step.block_tables[index, position // self.block_size])
                slot = block * self.block_size + position % self.block_size
                assert self.memory[slot] == self.history(self.sequences[seq_id], position + 1)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), has_changed=st.sampled_from([False, False, False, True]))
    def come_back(self, data: st.DataObject, has_changed: bool) -> None:
        """The dense worker died; the gateway submits a prefix of what exists, or (never, in truth) others."""
        seq_id = data.draw(st.sampled_from(sorted(self.sequences)))
        sequence = self.sequences[seq_id]
        length = data.draw(st.integers(sequence.num_prompt, len(sequence.tokens)))
        tokens = sequence.tokens[:length]
        disagrees = False
        if has_changed:
            changed = data.draw(st.integers(0, length - 1))
            tokens[changed] += 2
            disagrees = changed < sequence.num_known
        result = self.cache.open_sequence(seq_id, tokens, sequence.num_prompt, sequence.salt)
        kept = min(sequence.num_computed, length - 1)
        if disagrees:
            assert result.num_cached_tokens < length and result.num_cached_tokens % self.block_size == 0
        else:
            assert result.num_cached_tokens in (kept, kept // self.block_size * self.block_size)
            assert result.num_pinned_blocks == 0
            if kept == sequence.num_computed:
                assert result.num_cached_tokens == kept and result.num_freed_blocks == 0
        if has_changed and not disagrees:
            # The cache cannot know better than the journal; what the memory holds is the journal's truth.
            self.rewrite_memory(sequence, tokens, result.num_cached_tokens)
        assert result.num_held_blocks == self.num_blocks_for(result.num_cached_tokens)
        self.num_free += result.num_freed_blocks - result.num_pinned_blocks
        sequence.tokens = tokens
        sequence.num_known, sequence.num_computed = length, result.num_cached_tokens

    def rewrite_memory(self, sequence: Sequence, tokens: list[int], num_tokens: int) -> None:
        old = {self.history(sequence, length): length for length in range(1, num_tokens + 1)}
        new = Sequence(tokens, sequence.num_prompt, sequence.salt, 0, 0)
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
        expected = {s: self.num_blocks_for(q.num_computed) for s, q in self.sequences.items()}
        assert cache.held_blocks == expected

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close_sequences(list(self.sequences))
            self.cache.check_integrity()
            assert self.cache.num_free_blocks == self.num_blocks and self.cache.num_sequences == 0


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
