"""Openings, answers and cancellations that arrive at any time while a step runs."""

from __future__ import annotations

from collections import deque
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.attn_worker.cache.build_cache import build_cache
from services.dense_worker.engine.limits import Policy, SchedulerLimits
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.session import ScheduledStep
from services.step import PlanAccepted, SequenceOpened
from tests.support.attention.open_now import open_sequence
from tests.support.dense.scheduler_cluster import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    expected_output,
    make_sequence,
    new_attachment,
    sample,
)
from tests.support.examples import examples

MAX_NUM_STEPS = 5_000


class Cluster:
    """A scheduler and a KV cache, connected by two streams. Messages arrive in order, but at random times."""

    def __init__(
        self, policy: Policy, num_blocks: int, max_num_seqs: int, budget: int, random: Random, *, is_known_empty: bool
    ) -> None:
        """`is_known_empty`: the scheduler knows what the cache has, and lets most sequences start at once."""
        self.cache = build_cache(num_blocks, BLOCK_SIZE, MAX_MODEL_LEN)
        limits = SchedulerLimits(max_num_seqs, budget, MAX_MODEL_LEN, 1000, policy)
        self.scheduler = Scheduler(limits)
        self.scheduler.begin(new_attachment(self.cache, is_empty=is_known_empty))
        self.to_cancel: list[int] = []
        self._random = random
        self._in_flight: ScheduledStep | None = None
        self._to_attention: deque[Sequence | ScheduledStep] = deque()
        self._to_dense: deque[SequenceOpened | PlanAccepted] = deque()

    @property
    def is_idle(self) -> bool:
        is_quiet = self._in_flight is None and not self._to_attention and not self._to_dense
        return is_quiet and not (self.scheduler.num_running or self.scheduler.num_waiting)

    def step(self) -> None:
        """Does the work of `Engine._step`. In between, random events happen before the step in flight has ended."""
        self._let_things_happen()
        self._open()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._to_attention.append(plan)
        self._let_things_happen()
        if self._in_flight is not None:
            self._complete(self._in_flight)
        self._in_flight = plan

    def _let_things_happen(self) -> None:
        for _ in range(self._random.randrange(4)):
            match self._random.randrange(4):
                case 0:
                    self._run_attention()
                case 1:
                    self._handle_answer()
                case 2:
                    self._open()
                case 3 if self.to_cancel:
                    self.scheduler.cancel(self.to_cancel.pop())
        ledger = self.scheduler.session.ledger
        assert ledger.num_available_blocks >= 0

    def _open(self) -> None:
        """Those that start empty are in the next plan."""
        chosen = self.scheduler.next_to_open()
        self._to_attention.extend(each for each in chosen if each.status is SequenceStatus.OPENING)

    def _run_attention(self) -> None:
        if not self._to_attention:
            return
        message = self._to_attention.popleft()
        if isinstance(message, Sequence):
            token_ids = message.spec.prompt_token_ids + message.output_token_ids
            self._to_dense.append(open_sequence(self.cache, message.seq_id, token_ids, message.num_prompt_tokens))
            return
        for new in message.plan.new_sequences:
            if new.starts_empty:
                result = self.cache.open_sequence(new)
                assert result.num_held_blocks == 0, "the scheduler has known that nothing of it is cached"
        step = self.cache.plan_step(message.plan)
        assert not step.errors, "both sides must agree on lengths and blocks"
        if message.plan.close_seq_ids:
            self._to_dense.append(PlanAccepted(message.plan.step_id, step.num_freed_blocks))

    def _handle_answer(self) -> None:
        if not self._to_dense:
            return
        answer = self._to_dense.popleft()
        if isinstance(answer, PlanAccepted):
            self.scheduler.accepted(answer)
        else:
            self.scheduler.opened(answer)

    def _complete(self, published: ScheduledStep) -> None:
        while published in self._to_attention:
            self._run_attention()
        self.cache.commit_step()
        self.scheduler.update(published, sample(published.plan))


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24), st.booleans(), st.booleans()), min_size=1, max_size=14),
    st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    st.integers(16, 40),
    st.integers(1, 6),
    st.integers(6, 40),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_tokens_are_right_and_blocks_are_freed_with_events_at_any_time(
    arrivals: list[tuple[int, int, bool, bool]],
    policy: Policy,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    seed: int,
    is_known_empty: bool,
) -> None:
    cluster = Cluster(policy, num_blocks, max_num_seqs, budget, Random(seed), is_known_empty=is_known_empty)
    sequences, cancelled = [], set()
    for seq_id, (prompt_len, max_tokens, can_stop, is_cancelled) in enumerate(arrivals, start=1):
        sequences.append(make_sequence(seq_id, prompt_len, max_tokens, can_stop=can_stop))
        cluster.scheduler.add(sequences[-1])
        if is_cancelled:
            cancelled.add(seq_id)
            cluster.to_cancel.append(seq_id)
        cluster.step()
    for _ in range(MAX_NUM_STEPS):
        was_idle = cluster.is_idle and not cluster.to_cancel
        cluster.step()
        if was_idle and cluster.is_idle:  # and no sequence had to be closed
            break
    else:
        raise AssertionError(f"not idle after {MAX_NUM_STEPS} steps")
    for sequence in sequences:
        assert sequence.status is SequenceStatus.FINISHED
        if sequence.seq_id not in cancelled:
            assert sequence.output_token_ids == expected_output(sequence)
    cluster.cache.check_integrity()
    assert cluster.cache.num_sequences == 0 and cluster.cache.num_free_blocks == num_blocks
    ledger = cluster.scheduler.session.ledger
    assert (ledger.num_free_blocks, ledger.num_reserved_blocks) == (num_blocks, 0)
