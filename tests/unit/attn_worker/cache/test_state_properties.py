"""States of gated delta layers with events in any order, several steps ahead, and a simulation of their memory.

For every slot the simulated memory has the tokens that its state was made of. A step that starts from a slot with other
tokens would compute something else than the sequence's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.cache.cached_sequence import PlannedStep
from services.attn_worker.cache.state_group import StepStates, null_slot, zero_slot
from tests.support.attention.open_now import open_sequence
from tests.support.examples import examples
from tests.support.plans import make_plan

NUM_BLOCKS, MAX_MODEL_LEN, MAX_NUM_SEQS = 400, 30, 4
MAX_IN_FLIGHT = 3
TOKENS = st.integers(0, 1)
PROMPTS = st.builds(
    lambda token, length, tail: [token] * length + tail,
    TOKENS,
    st.integers(0, 12),
    st.lists(TOKENS, min_size=1, max_size=3),
)


@dataclass
class Sequence:
    tokens: list[int]
    num_prompt: int
    num_known: int  # tokens that the cache knows
    num_computed: int
    num_committed: int
    num_before: int = 0  # the committed length before that
    is_orphan: bool = False


class StateMachine(RuleBasedStateMachine):
    """Up to MAX_NUM_SEQS sequences of the dense worker run at a time; orphans of earlier ones come on top."""

    @initialize(num_more=st.sampled_from([0, 1, 4, 60]), block_size=st.sampled_from([1, 2, 4]), has_cache=st.booleans())
    def start(self, num_more: int, block_size: int, has_cache: bool) -> None:
        # Fewer slots than the worker has for so many steps ahead: what must be given up, is.
        self.num_slots = 2 * MAX_NUM_SEQS + num_more
        self.is_ample = num_more == 60
        self.has_cache = has_cache
        self.block_size = block_size
        self.cache = build_cache(
            NUM_BLOCKS, block_size, MAX_MODEL_LEN, enable_prefix_cache=has_cache, num_state_slots=self.num_slots
        )
        self.memory: dict[int, tuple[int, ...]] = {zero_slot(self.num_slots): ()}
        self.sequences: dict[int, Sequence] = {}
        self.in_flight: deque[dict[int, int]] = deque()  # the lengths that each step leaves, by seq_id
        self.next_seq_id = 0

    def running(self) -> list[int]:
        return [seq_id for seq_id, each in self.sequences.items() if not each.is_orphan]

    @precondition(lambda self: len(self.running()) < MAX_NUM_SEQS and len(self.sequences) < 2 * MAX_NUM_SEQS)
    @rule(tokens=PROMPTS)
    def open(self, tokens: list[int]) -> None:
        result = open_sequence(self.cache, self.next_seq_id, tokens, len(tokens))
        cached = result.num_cached_tokens
        assert cached < len(tokens) and cached % self.block_size == 0 and (self.has_cache or not cached)
        self.sequences[self.next_seq_id] = Sequence(list(tokens), len(tokens), len(tokens), cached, cached)
        self.next_seq_id += 1

    @precondition(lambda self: len(self.in_flight) < MAX_IN_FLIGHT)
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        """Closes at most one sequence, forks at most one at its end, and runs some."""
        running = self.running()
        closed = data.draw(st.lists(st.sampled_from(running), max_size=1)) if running else []
        running = [seq_id for seq_id in running if seq_id not in closed]
        sampled = []
        for seq_id in running:
            sequence = self.sequences[seq_id]
            for token_id in sequence.tokens[sequence.num_known : sequence.num_computed]:
                sampled.append((seq_id, token_id))  # of steps before the last planned one
            sequence.num_known = max(sequence.num_known, sequence.num_computed)
        forks = self.draw_fork(data, running)
        entries = []
        for seq_id in data.draw(st.lists(st.sampled_from(running), unique=True)) if running else []:
            sequence = self.sequences[seq_id]
            if sequence.num_computed == len(sequence.tokens) < MAX_MODEL_LEN:
                sequence.tokens.append(data.draw(TOKENS))
            left = len(sequence.tokens) - sequence.num_computed
            if left:
                entries.append((seq_id, data.draw(st.integers(1, left)), sequence.num_computed))
        has_stranger = data.draw(st.sampled_from([False, False, False, True]))
        entries += [(999, 2, 0)] if has_stranger else []
        planned = self.cache.plan_step(make_plan(entries, closed, sampled, forks))
        for seq_id in closed:
            del self.sequences[seq_id]
        for parent_id, child_id, position in forks:
            assert child_id not in planned.errors
            parent = self.sequences[parent_id]
            committed = min(position, parent.num_committed)
            self.sequences[child_id] = replace(parent, tokens=parent.tokens[:position], num_committed=committed)
            for lengths in self.in_flight:
                if parent_id in lengths:
                    lengths[child_id] = min(position, lengths[parent_id])
        self.run_on_memory(entries, planned, has_stranger)

    def draw_fork(self, data: st.DataObject, running: list[int]) -> list[tuple[int, int, int]]:
        parents = [seq_id for seq_id in running if self.sequences[seq_id].num_computed > 0]
        if not parents or len(running) >= MAX_NUM_SEQS or not data.draw(st.sampled_from([False, False, True])):
            return []
        parent = data.draw(st.sampled_from(parents))
        self.next_seq_id += 1
        return [(parent, self.next_seq_id - 1, self.sequences[parent].num_computed)]

    def run_on_memory(self, entries: list[tuple[int, int, int]], planned: PlannedStep, has_stranger: bool) -> None:
        assert planned.errors.keys() == ({999} if has_stranger else set())
        states, lengths = planned.metadata.of(StepStates), {}
        assert states is not None
        owners = [(seq_id, position + index) for seq_id, count, position in entries for index in range(count)]
        rows = list[int]()
        for wave in states.waves:
            assert len(set(wave.targets)) == len(wave.targets), "parts that run at once write different slots"
            assert not set(wave.targets) & set(wave.sources)
            written = {}
            for first_row, count, source, target in zip(
                wave.first_rows, wave.num_tokens, wave.sources, wave.targets, strict=True
            ):
                rows += range(first_row, first_row + count)
                seq_id, position = owners[first_row]
                if seq_id == 999:
                    assert (source, target) == (zero_slot(self.num_slots), null_slot(self.num_slots))
                    continue
                tokens = self.sequences[seq_id].tokens
                assert self.memory[source] == tuple(tokens[:position])
                assert target < self.num_slots
                written[target] = tuple(tokens[: position + count])
            self.memory |= written
        assert sorted(rows) == list(range(len(owners)))
        for seq_id, count, position in entries:
            if seq_id != 999:
                self.sequences[seq_id].num_computed = lengths[seq_id] = position + count
        self.in_flight.append(lengths)

    @precondition(lambda self: self.in_flight)
    @rule()
    def commit(self) -> None:
        self.cache.commit_step()
        for seq_id, length in self.in_flight.popleft().items():
            if (sequence := self.sequences.get(seq_id)) is not None:
                sequence.num_before, sequence.num_committed = sequence.num_committed, length

    @rule()
    def lose_dense_worker(self) -> None:
        """Steps that are not committed are void; every sequence keeps its committed state, unless slots were short."""
        self.cache.abort_steps()
        self.in_flight.clear()
        known = self.cache.orphaned_blocks
        for seq_id, sequence in list(self.sequences.items()):
            if seq_id not in known:
                assert not self.is_ample
                del self.sequences[seq_id]
                continue
            sequence.num_computed, sequence.is_orphan = sequence.num_committed, True
            del sequence.tokens[max(sequence.num_known, sequence.num_committed) :]

    @precondition(lambda self: len(self.running()) < MAX_NUM_SEQS and len(self.running()) < len(self.sequences))
    @rule(data=st.data(), misses_last=st.booleans())
    def resubmit(self, data: st.DataObject, misses_last: bool) -> None:
        """A new dense worker takes a sequence up. Its clients know the last committed step's token, or not."""
        orphans = [seq_id for seq_id, each in self.sequences.items() if each.is_orphan]
        seq_id = data.draw(st.sampled_from(orphans))
        sequence = self.sequences[seq_id]
        length = sequence.num_committed if misses_last else sequence.num_committed + 1
        length = min(max(length, sequence.num_prompt), MAX_MODEL_LEN)
        sequence.tokens += [0] * (length - len(sequence.tokens))
        tokens = sequence.tokens[:length]
        result = open_sequence(self.cache, seq_id, tokens, sequence.num_prompt)
        cached, kept = result.num_cached_tokens, min(sequence.num_committed, length - 1)
        assert cached <= max(kept, (length - 1) // self.block_size * self.block_size)
        if self.is_ample and kept == sequence.num_committed:
            assert cached == kept
        if self.is_ample and kept == sequence.num_committed - 1 == sequence.num_before:
            assert cached >= kept, "the state before the last step is kept"
        self.sequences[seq_id] = Sequence(tokens, sequence.num_prompt, length, cached, cached)

    @precondition(lambda self: any(each.is_orphan for each in self.sequences.values()))
    @rule(data=st.data())
    def close_orphan(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from([each for each in self.sequences if self.sequences[each].is_orphan]))
        self.cache.close_sequences([seq_id])
        del self.sequences[seq_id]

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()
            pool = self.cache.pools["states"]
            assert pool is not None and pool.num_free_blocks + pool.num_used_blocks == self.num_slots
            assert self.cache.orphaned_blocks.keys() == self.sequences.keys()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.abort_steps()
            self.cache.close_sequences(list(self.sequences))
            self.cache.check_integrity()
            assert self.cache.num_free_blocks == NUM_BLOCKS and self.cache.pools["states"].num_used_blocks == 0


TestStates = StateMachine.TestCase
TestStates.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
