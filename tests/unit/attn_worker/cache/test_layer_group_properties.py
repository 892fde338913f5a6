"""KVCache with two groups of layers and events in any order, as on a GPU: steps are committed late.

The memory of both groups is simulated: for every slot all tokens from which its key was computed. The blocks of the
windows are as few as `SlidingWindow.pool_blocks` says. They must be enough for as many sequences as may be open,
whatever a dead dense worker has left behind.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.cache.step_metadata import StepMetadata
from services.common.errors import RequestAborted
from tests.support.attention.open_now import open_sequence
from tests.support.examples import examples
from tests.support.plans import make_plan, make_window_group

MAX_MODEL_LEN, NUM_BLOCKS = 40, 400  # enough blocks of the other layers for all sequences
MAX_NUM_SEQS, MAX_STEP_TOKENS, MAX_IN_FLIGHT, MAX_NUM_ORPHANS = 3, 6, 2, 5
TOKENS = st.integers(0, 1)
PROMPTS = st.builds(
    lambda token, length, tail: [token] * length + tail,
    TOKENS,
    st.integers(0, 20),
    st.lists(TOKENS, min_size=1, max_size=3),
)


@dataclass
class Sequence:
    tokens: list[int]
    num_prompt: int
    num_known: int
    num_computed: int  # planned ones, without drafts
    num_committed: int
    is_claimed: bool = True


@dataclass
class Step:
    """A planned step that has not been committed."""

    lengths: dict[int, int] = field(default_factory=dict)  # by seq_id, without drafts
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)


class TwoGroups(RuleBasedStateMachine):
    """Requests arrive, run in chunks or one by one with drafts, fork, end, and survive their dense worker."""

    @initialize(block_size=st.sampled_from([1, 2, 4]), window=st.integers(1, 9), has_prefix_cache=st.booleans())
    def start(self, block_size: int, window: int, has_prefix_cache: bool) -> None:
        group = make_window_group(window, block_size, MAX_NUM_SEQS, MAX_STEP_TOKENS)
        self.cache = build_cache(
            NUM_BLOCKS, block_size, MAX_MODEL_LEN, window_blocks=group, enable_prefix_cache=has_prefix_cache
        )
        self.block_size, self.window = block_size, window
        self.memories: tuple[dict[int, tuple[int, ...]], ...] = ({}, {})
        self.sequences: dict[int, Sequence] = {}
        self.in_flight: deque[Step] = deque()
        self.next_seq_id = 0

    @property
    def claimed(self) -> list[int]:
        return [seq_id for seq_id, each in self.sequences.items() if each.is_claimed]

    @property
    def orphans(self) -> list[int]:
        return [seq_id for seq_id, each in self.sequences.items() if not each.is_claimed]

    @precondition(lambda self: len(self.claimed) < MAX_NUM_SEQS)
    @rule(tokens=PROMPTS)
    def open(self, tokens: list[int]) -> None:
        self.next_seq_id += 1
        self.open_as(self.next_seq_id, tokens, len(tokens))

    @precondition(lambda self: self.orphans and len(self.claimed) < MAX_NUM_SEQS)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        """A gateway submits a sequence of a dead dense worker again, with all of its tokens or a few less."""
        seq_id = data.draw(st.sampled_from(self.orphans))
        sequence = self.sequences[seq_id]
        length = data.draw(st.integers(max(sequence.num_prompt, len(sequence.tokens) - 4), len(sequence.tokens)))
        self.open_as(seq_id, sequence.tokens[:length], sequence.num_prompt)

    def open_as(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:
        result = open_sequence(self.cache, seq_id, tokens, num_prompt)
        num_cached = result.num_cached_tokens
        assert num_cached < len(tokens) and result.num_held_blocks == -(-num_cached // self.block_size)
        self.sequences[seq_id] = Sequence(list(tokens), num_prompt, len(tokens), num_cached, num_cached)

    @precondition(lambda self: self.sequences and len(self.in_flight) <= MAX_IN_FLIGHT)
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        closed = data.draw(st.lists(st.sampled_from(sorted(self.sequences)), unique=True, max_size=1))
        for seq_id in closed:
            del self.sequences[seq_id]
        sampled = []
        for seq_id in self.claimed:
            sequence = self.sequences[seq_id]
            news = sequence.tokens[sequence.num_known : sequence.num_committed + 1]
            sampled += [(seq_id, token_id) for token_id in news]
            sequence.num_known += len(news)
        forks, step = self.draw_forks(data), Step()
        entries: list[tuple[int, int, int]] = []
        for seq_id in data.draw(st.permutations(self.claimed)):
            num_left = MAX_STEP_TOKENS - sum(count for _, count, _ in entries)
            if num_left and (entry := self.draw_entry(data, seq_id, num_left, step)) is not None:
                entries.append(entry)
        planned = self.cache.plan_step(make_plan(entries, closed, sampled, forks, step.drafts))
        copies = tuple(map(list, planned.block_copies))
        for parent_id, child_id, position in forks:
            if child_id in planned.errors:
                assert isinstance(planned.errors[child_id], RequestAborted)
                assert position < self.sequences[parent_id].num_committed, "it has what the next token reads"
            else:
                self.apply_fork(parent_id, child_id, position, copies)
        assert planned.errors.keys() <= {child_id for _, child_id, _ in forks}, "both groups have room for all"
        assert copies == ([], [])
        for group, part in enumerate(planned.metadata.parts(2)):
            self.check_part(group, part, entries, step)
        self.in_flight.append(step)

    def draw_forks(self, data: st.DataObject) -> list[tuple[int, int, int]]:
        """At the end of what is computed, or anywhere before: or none."""
        parents = [seq_id for seq_id in self.claimed if self.sequences[seq_id].num_computed]
        if len(self.claimed) == MAX_NUM_SEQS or not parents or not data.draw(st.sampled_from([False, False, True])):
            return []
        self.next_seq_id += 1
        parent = data.draw(st.sampled_from(parents))
        num_computed = self.sequences[parent].num_computed
        position = data.draw(st.one_of(st.just(num_computed), st.integers(1, num_computed)))
        return [(parent, self.next_seq_id, position)]

    def draw_entry(
        self, data: st.DataObject, seq_id: int, num_left: int, step: Step
    ) -> tuple[int, int, int] | None:
        sequence = self.sequences[seq_id]
        position = sequence.num_computed
        has_drafts = any(seq_id in each.drafts for each in self.in_flight)  # their result decides its position
        if has_drafts or position == MAX_MODEL_LEN or data.draw(st.sampled_from([False, False, True])):
            return None
        if position == len(sequence.tokens):
            sequence.tokens.append(data.draw(TOKENS))
        num_tokens = data.draw(st.integers(1, min(num_left, len(sequence.tokens) - position)))
        end = position + num_tokens
        if end == len(sequence.tokens):
            most = min(MAX_NUM_SEQS - 1, num_left - num_tokens, MAX_MODEL_LEN - end)
            if drafts := tuple(data.draw(st.lists(TOKENS, max_size=most))):
                step.drafts[seq_id] = drafts
        sequence.num_computed = step.lengths[seq_id] = end
        return seq_id, num_tokens + len(step.drafts.get(seq_id, ())), position

    def apply_fork(
        self, parent_id: int, child_id: int, position: int, copies: tuple[list[tuple[int, int]], ...]
    ) -> None:
        parent, size = self.sequences[parent_id], self.block_size
        num_known, num_committed = min(parent.num_known, position), min(parent.num_committed, position)
        num_prompt = min(parent.num_prompt, position)
        self.sequences[child_id] = Sequence(
            parent.tokens[:position], num_prompt, num_known, position, num_committed
        )
        for step in self.in_flight:
            if parent_id in step.lengths:
                step.lengths[child_id] = min(position, step.lengths[parent_id])
        if position % size:
            for memory, pairs in zip(self.memories, copies, strict=True):
                source, target = pairs.pop(0)
                for offset in range(size):
                    memory[target * size + offset] = memory.get(source * size + offset, ())

    def check_part(
        self, group: int, part: StepMetadata, entries: list[tuple[int, int, int]], step: Step
    ) -> None:
        """Writes every row's tokens to its slot, then checks all slots that each sequence reads."""
        memory, size, row = self.memories[group], self.block_size, 0
        contents = {seq_id: (*self.sequences[seq_id].tokens, *step.drafts.get(seq_id, ())) for seq_id, *_ in entries}
        null_block = self.cache.num_blocks if group == 0 else self.cache.pools["windows"].num_blocks
        for seq_id, num_tokens, position in entries:
            for place in range(position, position + num_tokens):
                assert part.positions[row] == place and part.slot_mapping[row] < null_block * size
                memory[int(part.slot_mapping[row])] = contents[seq_id][: place + 1]
                row += 1
        for index, (seq_id, num_tokens, position) in enumerate(entries):
            end = position + num_tokens
            num_dropped, rest = divmod(end - int(part.context_lens[index]), size)
            first = max(0, position + 1 - self.window) if group else 0
            assert rest == 0 <= num_dropped <= first // size
            for place in range(first, end):
                block = int(part.block_tables[index, place // size - num_dropped])
                assert memory[block * size + place % size] == contents[seq_id][: place + 1]

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.cache.commit_step()
        step = self.in_flight.popleft()
        for seq_id, length in step.lengths.items():
            if (sequence := self.sequences.get(seq_id)) is None:
                continue
            sequence.num_committed = max(sequence.num_committed, length)
            if drafts := step.drafts.get(seq_id, ()):
                num_right = data.draw(st.integers(0, len(drafts)))
                sequence.tokens += drafts[:num_right]
                sequence.num_computed += num_right

    @precondition(lambda self: self.sequences and len(self.sequences) <= MAX_NUM_ORPHANS)
    @rule()
    def lose_dense_worker(self) -> None:
        """All planned steps are void. Every sequence keeps what has been committed."""
        self.cache.abort_steps()
        self.in_flight.clear()
        for sequence in self.sequences.values():
            sequence.is_claimed, sequence.num_computed = False, sequence.num_committed
            del sequence.tokens[max(sequence.num_known, sequence.num_committed) + 1 :]

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()
            assert self.cache.orphaned_blocks.keys() == self.sequences.keys()
            assert self.cache.pools["windows"].num_used_blocks <= self.cache.pools["windows"].num_blocks

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close_sequences(list(self.sequences))
            self.cache.check_integrity()
            assert self.cache.num_free_blocks == NUM_BLOCKS and self.cache.pools["windows"].num_used_blocks == 0


TestTwoGroups = TwoGroups.TestCase
TestTwoGroups.settings = settings(max_examples=examples(40), stateful_step_count=35, deadline=None)
