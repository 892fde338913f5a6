"""The scheduler with the real KV cache accounting, without a model: tokens are a function of position."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.cache.kv_cache import KVCache
from services.common.errors import CapacityError, InvalidRequest
from services.common.sampling_params import SamplingParams
from services.dense_worker.engine.attachment import AttachedCache, Attachment
from services.dense_worker.engine.limits import Policy, SchedulerLimits
from services.dense_worker.engine.planning.step_planner import MAX_HOST_S
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import FinishReason, Sequence, SequenceOutput, SequenceStatus
from services.dense_worker.engine.session import PublishedPlan, Session
from services.dense_worker.features.drafting.drafting import Drafting
from services.dense_worker.features.fork_policy import ForkPolicy
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.dense_worker.runner.step_hook import FollowUp
from services.step import PlanAccepted, RaggedTokens, StepPlan, StepResult
from tests.support.attention.open_now import open_sequence
from tests.support.dense.sequences import new_sequence
from tests.support.examples import examples
from tests.support.plans import make_plan, make_window_group

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
STOP_TOKEN = 7
WINDOWS = st.sampled_from([{}, *({name: n} for name in ("window", "layer_window") for n in (1, 6, 17))])  # all, or some


def next_token(seq_id: int, position: int) -> int:
    """The token that the simulated model samples. There are few values, so that sequences stop by chance."""
    return (seq_id * 31 + position * 17) % 11


def expected_output(sequence: Sequence) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < sequence.spec.max_tokens:
        tokens.append(next_token(sequence.seq_id, len(sequence.spec.prompt_token_ids) + len(tokens)))
        if tokens[-1] in sequence.spec.stop_token_ids:
            break
    return tokens


def make_sequence(seq_id: int, prompt_len: int, max_tokens: int, *, can_stop: bool = False) -> Sequence:
    return new_sequence(
        seq_id=seq_id,
        request_id=f"r{seq_id}",
        prompt_token_ids=[position % 3 for position in range(prompt_len)],
        sampling=SamplingParams(),
        max_tokens=max_tokens,
        stop_token_ids=frozenset([STOP_TOKEN]) if can_stop else frozenset(),
    )


def new_session(cache: KVCache, *, is_empty: bool = False) -> Session:
    """A new attachment to this cache, which says whether it is empty."""
    attached = AttachedCache(0, cache.num_blocks, cache.num_free_blocks, cache.orphaned_blocks, is_empty=is_empty)
    kept = cache.sliding_window.window, cache.sliding_window.num_sink_tokens, cache.uncounted_window
    return Session(Attachment(1, 1, {}, cache.block_size, (attached,), cache.max_model_len, *kept))


def sample(plan: StepPlan) -> StepResult:
    """The tokens that the simulated model samples for each entry: the right drafts, and one more."""
    token_ids: list[list[int]] = []
    for entry in plan.entries:
        first = entry.position + entry.num_tokens - entry.num_logits + 1
        sampled = [next_token(entry.seq_id, first + index) for index in range(entry.num_logits)]
        drafts = entry.draft_token_ids
        num_right = next((i for i, draft in enumerate(drafts) if draft != sampled[i]), len(drafts))
        token_ids.append(sampled[: num_right + 1])
    return StepResult(RaggedTokens.from_rows(token_ids))


class Cluster:
    """A scheduler and a KV cache, connected as in the engines: one plan ahead, and openings may be answered late."""

    def __init__(
        self,
        policy: Policy = "guaranteed_no_evict",
        num_blocks: int = 32,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_num_waiting: int = 1000,
        drafting: Drafting | None = None,
        max_model_len: int = MAX_MODEL_LEN,
        window: int | None = None,
        num_sink_tokens: int = 0,
        enable_prefix_cache: bool = True,
        layer_window: int | None = None,
        forks: ForkPolicy | None = None,
        **limits: float,
    ) -> None:
        kept = {"window": window, "num_sink_tokens": num_sink_tokens, "enable_prefix_cache": enable_prefix_cache}
        group = make_window_group(layer_window, BLOCK_SIZE, max_num_seqs, max_num_batched_tokens)
        self.cache = build_cache(num_blocks, BLOCK_SIZE, max_model_len, **kept, window_blocks=group)
        self.limits = SchedulerLimits(
            max_num_seqs, max_num_batched_tokens, max_model_len, max_num_waiting, policy, **limits
        )
        self.scheduler = Scheduler(self.limits, drafting, forks=forks)
        self.scheduler.begin(new_session(self.cache))
        self.in_flight: PublishedPlan | None = None
        self.follow_up: FollowUp | None = None  # what the plan in flight was asked for
        self.plans: list[StepPlan] = []
        self.outputs: list[SequenceOutput] = []
        self._opening: deque[Sequence] = deque()

    def step(self, *, answer_opens: bool = True) -> None:
        """Does the work of `Engine._step` and of the attention worker."""
        scheduler = self.scheduler
        self._opening.extend(each for each in scheduler.next_to_open() if each.status is SequenceStatus.OPENING)
        if answer_opens:
            self.answer_opens()
        self.follow_up = None
        step: Any = SimpleNamespace(running=self)
        waits = self.in_flight is not None and scheduler.waits_for(step)
        published = None if waits else scheduler.schedule()
        if published is not None:
            self.check(published.plan)
            self.plans.append(published.plan)
        if self.in_flight is not None:
            self._complete(self.in_flight)
        self.in_flight = published
        self.check_ledger()

    def follow_with(self, follow_up: FollowUp) -> None:
        self.follow_up = follow_up

    def attach_again(self) -> None:
        """The stream broke: the plan in flight is lost, and the attention worker keeps its sequences."""
        self.in_flight = None
        self._opening.clear()
        self.scheduler.begin(new_session(self.cache))
        self.scheduler.close_orphans()  # sequences whose closing was lost with the plan

    def answer_opens(self) -> None:
        while self._opening:
            self.scheduler.opened(self.cache.open_sequence(self._opening.popleft().describe()))

    def _complete(self, published: PublishedPlan) -> None:
        plan = published.plan
        step = self.cache.plan_step(plan)
        assert not step.errors, "both sides must agree on lengths and blocks"
        self.cache.commit_step()
        if plan.frees_blocks:
            self.outputs += self.scheduler.accepted(PlanAccepted(plan.step_id, step.num_freed_blocks))
        self.outputs += self.scheduler.update(published, self.result_of(plan))

    def result_of(self, plan: StepPlan) -> StepResult:
        return sample(plan)

    def check(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert len(plan.entries) <= self.limits.max_num_seqs
        assert len({entry.seq_id for entry in plan.entries}) == len(plan.entries)
        sizes = [entry.num_tokens - len(entry.draft_token_ids) == 1 for entry in plan.entries]
        assert all(entry.num_tokens >= 1 for entry in plan.entries)
        if False in sizes:  # single tokens come first; only the last prefill may be cut to one token
            assert True not in sizes[sizes.index(False) : -1]

    def check_ledger(self) -> None:
        ledger = self.scheduler.session.ledger
        assert ledger.num_available_blocks >= 0
        assert ledger.num_free_blocks <= self.cache.num_free_blocks, "the scheduler must never promise too much"

    def run_until_idle(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            self.step()
            if self.in_flight is None and not self.scheduler.num_running and not self.scheduler.num_waiting:
                self.step()
                if self.in_flight is None:
                    break
        else:
            raise AssertionError(f"not idle after {max_steps} steps")
        self.cache.check_integrity()
        assert self.cache.num_sequences == 0
        assert self.cache.num_free_blocks == self.cache.num_blocks
        assert all(pool.num_used_blocks == 0 for pool in self.cache.pools.values())
        assert self.scheduler.session.ledger.num_free_blocks == self.cache.num_blocks
        assert self.scheduler.session.ledger.num_reserved_blocks == 0


requests = st.lists(
    st.tuples(
        st.integers(1, 40),  # prompt
        st.integers(1, 24),  # max_tokens
        st.booleans(),  # can stop
        st.integers(0, 3),  # steps before the next request
        st.one_of(st.none(), st.integers(0, 12)),  # the number of steps after which it is cancelled
    ),
    min_size=1,
    max_size=14,
)


def run_arrivals(
    cluster: Cluster, arrivals: list[tuple[int, int, bool, int, int | None]], answer_every: int
) -> tuple[list[Sequence], set[int]]:
    """Adds, cancels and runs these `requests` to their ends. Returns them, and the seq_ids of cancelled ones."""
    sequences, cancels = [], []
    for seq_id, (prompt_len, max_tokens, can_stop, gap, cancel_after) in enumerate(arrivals, start=1):
        sequence = make_sequence(seq_id, prompt_len, max_tokens, can_stop=can_stop)
        cluster.scheduler.add(sequence)
        sequences.append(sequence)
        if cancel_after is not None:
            cancels.append([cancel_after, seq_id])
        for number in range(gap):
            for cancel in cancels:
                cancel[0] -= 1
                if cancel[0] == 0:
                    cluster.scheduler.cancel(cancel[1])
            cluster.step(answer_opens=number % answer_every == 0)
    cluster.run_until_idle()
    return sequences, {seq_id for remaining, seq_id in cancels if remaining <= 0}


def check_outputs(sequences: list[Sequence], cancelled: set[int]) -> None:
    """Whoever was not cancelled in time has all its tokens."""
    for sequence in sequences:
        if sequence.seq_id not in cancelled or sequence.status is not SequenceStatus.FINISHED:
            assert sequence.output_token_ids == expected_output(sequence)


@settings(max_examples=examples(150), deadline=None)
@given(
    requests,
    st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    st.integers(16, 40),
    st.integers(1, 6),
    st.integers(6, 40),
    st.integers(1, 3),
    WINDOWS,
)
def test_every_sequence_gets_its_tokens_and_every_block_is_freed(
    arrivals: list[tuple[int, int, bool, int, int | None]],
    policy: Policy,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    answer_every: int,
    kept: dict[str, int],
) -> None:
    cluster = Cluster(policy, num_blocks, max_num_seqs, budget, **kept)
    sequences, cancelled = run_arrivals(cluster, arrivals, answer_every)
    check_outputs(sequences, cancelled)
    ended = [output.sequence.seq_id for output in cluster.outputs if output.finish_reason is not None]
    assert len(ended) == len(set(ended)), "a sequence ends once"
    delivered: dict[int, list[int]] = {}
    for output in cluster.outputs:
        assert output.token_ids
        delivered.setdefault(output.sequence.seq_id, []).extend(output.token_ids)
    for sequence in sequences:
        if sequence.seq_id not in cancelled:
            assert delivered[sequence.seq_id] == expected_output(sequence)


def test_a_long_prompt_does_not_delay_running_streams() -> None:
    cluster = Cluster(num_blocks=64, max_num_batched_tokens=8)
    cluster.scheduler.add(make_sequence(1, 2, 40))
    for _ in range(4):
        cluster.step()
    before = len(cluster.plans)
    cluster.scheduler.add(make_sequence(2, 40, 4))
    for _ in range(12):
        cluster.step()
    for plan in cluster.plans[before:]:
        assert 1 in [entry.seq_id for entry in plan.entries], "a decode was left out of a step"
    chunks = [entry.num_tokens for plan in cluster.plans for entry in plan.entries if entry.seq_id == 2]
    assert max(chunks) == 7 and sum(chunks[:6]) == 40, "the prompt gets the rest of the budget"


def test_a_late_short_request_ends_before_an_early_long_one() -> None:
    cluster = Cluster()
    cluster.scheduler.add(make_sequence(1, 4, 40))
    for _ in range(5):
        cluster.step()
    cluster.scheduler.add(make_sequence(2, 4, 3))
    cluster.run_until_idle()
    ends = [output.sequence.seq_id for output in cluster.outputs if output.finish_reason is not None]
    assert ends == [2, 1]


def test_sequences_are_opened_in_arrival_order_even_if_a_later_one_would_fit() -> None:
    cluster = Cluster(num_blocks=16, max_num_seqs=4)
    cluster.scheduler.add(make_sequence(1, 20, 20))  # 10 blocks
    cluster.scheduler.add(make_sequence(2, 30, 10))  # 10 blocks, so it must wait
    cluster.scheduler.add(make_sequence(3, 2, 2))  # this one would fit
    assert [sequence.seq_id for sequence in cluster.scheduler.next_to_open()] == [1]


def test_guaranteed_policy_never_preempts_and_utilization_policy_does() -> None:
    for policy, expects_preemption in (("guaranteed_no_evict", False), ("max_utilization", True)):
        cluster = Cluster(policy, num_blocks=16, max_num_seqs=6)
        for seq_id in range(1, 7):
            cluster.scheduler.add(make_sequence(seq_id, 5 + seq_id, 30))
        cluster.run_until_idle()
        assert bool(cluster.scheduler.num_preemptions) is expects_preemption


def test_a_plan_is_published_before_the_previous_step_ends() -> None:
    cluster, sequence = Cluster(), make_sequence(1, 3, 10)
    cluster.scheduler.add(sequence)
    cluster.step()
    cluster.step()  # the second plan exists although the first step's token is not known
    assert [plan.entries[0].position for plan in cluster.plans] == [0, 3]
    assert sequence.num_computed_tokens == 4


def test_a_stopped_sequence_wastes_at_most_one_token() -> None:
    cluster = Cluster()
    seq_id = next(i for i in range(1, 50) if STOP_TOKEN in [next_token(i, 3 + n) for n in range(10)])
    sequence = make_sequence(seq_id, 3, 30, can_stop=True)
    cluster.scheduler.add(sequence)
    cluster.run_until_idle()
    num_sampled = sum(entry.num_logits for plan in cluster.plans for entry in plan.entries)
    assert sequence.output_token_ids[-1] == STOP_TOKEN
    assert num_sampled <= len(sequence.output_token_ids) + 1


def test_cancelled_request_frees_its_blocks_within_one_step() -> None:
    cluster = Cluster()
    cluster.scheduler.add(make_sequence(1, 20, 40))
    for _ in range(6):
        cluster.step()
    cluster.scheduler.cancel(1)
    cluster.step()  # publishes the close, completes the step in flight
    cluster.step()
    assert cluster.cache.num_used_blocks == 0


def test_after_a_new_attachment_a_sequence_continues_with_its_blocks() -> None:
    cluster = Cluster()
    sequence = make_sequence(1, 10, 20)
    cluster.scheduler.add(sequence)
    for _ in range(6):
        cluster.step()
    num_computed = sequence.num_computed_tokens
    cluster.attach_again()
    cluster.step()
    first = cluster.plans[-1].entries[0]
    assert first.num_tokens <= 2 and first.position >= num_computed - 2, "nothing is prefilled again"
    cluster.run_until_idle()
    assert sequence.output_token_ids == expected_output(sequence)


def test_blocks_with_other_tokens_are_released_and_their_prefix_is_found_again() -> None:
    cluster = Cluster(num_blocks=8)
    sequence = make_sequence(1, 16, 8)
    open_sequence(cluster.cache, 1, [*sequence.spec.prompt_token_ids, 9, 9, 9, 9], 16)
    cluster.cache.plan_step(make_plan([(1, 20, 0)]))
    cluster.cache.commit_step()
    sequence.output_token_ids = expected_output(sequence)[:2]
    cluster.scheduler.begin(new_session(cluster.cache))
    cluster.scheduler.add(sequence)
    cluster.run_until_idle()
    assert sequence.output_token_ids == expected_output(sequence)


def test_a_flush_reaches_no_blocks_of_one_that_only_an_absent_attention_worker_has_seen() -> None:
    generations = []
    for scheduler in (Cluster().scheduler, Cluster().scheduler):  # which know nothing of each other
        scheduler.forget_prefixes()
        scheduler.add(make_sequence(1, 9, 2))
        scheduler.next_to_open()
        [new] = scheduler.session.to_open
        generations.append(new.prefix_generation)
    assert 0 < generations[0] < generations[1]


def test_unclaimed_sequences_of_a_dead_worker_are_closed() -> None:
    cluster = Cluster()
    open_sequence(cluster.cache, 99, [1, 2, 3, 4, 5], 5)
    cluster.cache.plan_step(make_plan([(99, 5, 0)]))
    cluster.cache.commit_step()
    cluster.scheduler.begin(new_session(cluster.cache))
    cluster.scheduler.close_orphans()
    cluster.run_until_idle()


def test_if_the_attention_worker_cannot_run_a_sequence_only_that_one_fails() -> None:
    cluster = Cluster()
    first, second = make_sequence(1, 4, 8), make_sequence(2, 4, 8)
    cluster.scheduler.add(first)
    cluster.scheduler.add(second)
    cluster.step()
    published = cluster.in_flight
    assert published is not None
    outputs = cluster.scheduler.accepted(PlanAccepted(published.plan.step_id, errors={1: "no room"}))
    outputs += cluster.scheduler.update(published, StepResult(RaggedTokens.from_rows([[3], [4]])))
    ended = [(output.sequence.seq_id, output.finish_reason) for output in outputs]
    assert ended == [(1, FinishReason.ERROR), (2, None)]


def test_blocks_of_a_refused_step_are_free_again() -> None:
    cluster = Cluster()
    cluster.scheduler.add(make_sequence(1, 8, 4))
    cluster.step()
    published, cluster.in_flight = cluster.in_flight, None
    assert published is not None
    cluster.scheduler.accepted(PlanAccepted(published.plan.step_id, errors={1: "no room"}))
    cluster.scheduler.update(published, StepResult(RaggedTokens.from_rows([[3]])))
    cluster.run_until_idle()


@pytest.mark.parametrize(
    ("sequence", "error", "words"),
    [
        (make_sequence(1, 60, 10), InvalidRequest, "max_model_len is 64"),
        (make_sequence(1, 30, 20), CapacityError, "13 KV cache blocks, the cache has 8"),
    ],
)
def test_a_sequence_that_can_never_run_is_refused_with_value_and_limit(
    sequence: Sequence, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Cluster(num_blocks=8).scheduler.add(sequence)


def test_a_full_queue_refuses_with_its_length_and_limit() -> None:
    cluster = Cluster(max_num_waiting=2)
    cluster.scheduler.add(make_sequence(1, 4, 4))
    cluster.scheduler.add(make_sequence(2, 4, 4))
    with pytest.raises(CapacityError, match="2 sequences are waiting, the limit is 2"):
        cluster.scheduler.add(make_sequence(3, 4, 4))


class Costly(SequenceFeature):
    """As a grammar whose masks take long."""

    forces_tokens = True  # though it knows none

    @property
    def host_s(self) -> float:
        return 2 * MAX_HOST_S


def test_prompts_that_end_together_take_turns_if_their_first_tokens_take_long_of_the_host() -> None:
    cluster = Cluster(max_num_seqs=12, max_num_batched_tokens=64, num_blocks=64)
    costly = range(8)
    for seq_id in range(12):
        sequence = make_sequence(seq_id, 3, 2)
        if seq_id in costly:
            sequence.features = (Costly(),)
        cluster.scheduler.add(sequence)
    while cluster.scheduler.num_running or cluster.scheduler.num_waiting or cluster.in_flight is not None:
        cluster.step()
    counts = [sum(each.seq_id in costly for each in plan.entries) for plan in cluster.plans]
    assert max(counts) == 1 and sum(counts) == 2 * len(costly)
    assert {8, 9, 10, 11} <= {each.seq_id for each in cluster.plans[1].entries}, "the others wait for none of them"
    assert {each.sequence.seq_id for each in cluster.outputs if each.finish_reason is not None} == set(range(12))
