"""The scheduler with the real KV cache accounting, without a model: tokens are a function of position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.cache.kv_cache import KVCache
from services.common.sampling_params import SamplingParams
from services.dense_worker.engine.attachment import AttachedCache, Attachment
from services.dense_worker.engine.limits import Policy, SchedulerLimits
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import Sequence, SequenceOutput, SequenceStatus
from services.dense_worker.engine.session import ScheduledStep
from services.dense_worker.features.drafting.drafting import Drafting
from services.dense_worker.features.fork_policy import ForkPolicy
from services.dense_worker.runner.step_hook import FollowUp
from services.step import PlanAccepted, RaggedTokens, StepPlan, StepResult
from tests.support.dense.sequences import ask, new_sequence
from tests.support.plans import make_window_group

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


def new_attachment(cache: KVCache, *, is_empty: bool = False, num_host_blocks: int = 0) -> Attachment:
    """A new attachment to this cache, which says whether it is empty."""
    attached = AttachedCache(
        0,
        cache.num_blocks,
        cache.num_free_blocks,
        cache.orphaned_blocks,
        is_empty=is_empty,
        num_host_blocks=num_host_blocks,
    )
    kept = cache.sliding_window.window, cache.sliding_window.num_sink_tokens, cache.uncounted_window
    return Attachment(1, 1, {}, cache.block_size, (attached,), cache.max_model_len, *kept)


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
        num_host_blocks: int = 64,
        turn_tokens: int = 5,
        is_known_empty: bool = True,
        **limits: Any,
    ) -> None:
        """`is_known_empty`: the scheduler knows what the cache has, and lets most sequences start at once."""
        kept = {"window": window, "num_sink_tokens": num_sink_tokens, "enable_prefix_cache": enable_prefix_cache}
        group = make_window_group(layer_window, BLOCK_SIZE, max_num_seqs, max_num_batched_tokens)
        self.cache = build_cache(num_blocks, BLOCK_SIZE, max_model_len, **kept, window_blocks=group)
        self.limits = SchedulerLimits(
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            max_num_waiting,
            policy,
            turn_tokens=turn_tokens,
            **limits,
        )
        self.num_host_blocks = num_host_blocks
        self.scheduler = Scheduler(self.limits, drafting, forks=forks)
        self._is_known_empty = is_known_empty
        self._attach()
        self.in_flight: ScheduledStep | None = None
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

    def _attach(self) -> None:
        is_empty = self._is_known_empty and self.cache.is_empty
        self.scheduler.begin(new_attachment(self.cache, is_empty=is_empty, num_host_blocks=self.num_host_blocks))

    def follow_with(self, follow_up: FollowUp) -> None:
        self.follow_up = follow_up

    def attach_again(self) -> None:
        """The stream broke: the plan in flight is lost, and the attention worker keeps its sequences."""
        self.in_flight = None
        self._opening.clear()
        self._attach()
        self.scheduler.close_orphans()  # sequences whose closing was lost with the plan

    def answer_opens(self) -> None:
        while self._opening:
            self.scheduler.opened(self.cache.open_sequence(self._opening.popleft().describe()))

    def _complete(self, published: ScheduledStep) -> None:
        plan = published.plan
        self.open_starting(plan)
        step = self.cache.plan_step(plan)
        assert not step.errors, "both sides must agree on lengths and blocks"
        self.cache.commit_step()
        if plan.frees_blocks:
            self.outputs += self.scheduler.accepted(PlanAccepted(plan.step_id, step.num_freed_blocks))
        self.outputs += self.scheduler.update(published, self.result_of(plan))

    def open_starting(self, plan: StepPlan) -> None:
        """Opens the sequences that a plan opens and runs at once. The others have been opened for an answer."""
        for new in plan.new_sequences:
            if new.starts_empty:
                assert new.seq_id in plan.entries.seq_ids, "a plan opens those that it runs"
                assert new.seq_id not in self.cache.orphaned_blocks, "each is opened once"
                self.cache.open_sequence(new)

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
        session, ledger = self.scheduler.session, self.scheduler.session.ledger
        assert session.num_opening_rows == sum(each.sequence.num_rows for each in session.openings.values())
        assert session.starting.keys() <= {each.seq_id for each in session.running}
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
        if (turns := self.scheduler._turns) is not None:
            assert not (turns._promised or turns._leaving), "nobody is left who may come back"
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
    cluster: Cluster,
    arrivals: list[tuple[int, int, bool, int, int | None]],
    answer_every: int = 1,
    *,
    resets: Set[int] = frozenset(),
    prepare: Callable[[Sequence], object] = lambda sequence: None,
) -> tuple[list[Sequence], set[int]]:
    """Adds, cancels and runs these `requests` to their ends. Returns them, and the seq_ids of cancelled ones.

    resets: numbers of steps, from 1, before which there is a new attachment; prepare: called with each new sequence
    """
    sequences, cancels, num_steps = [], [], 0
    for seq_id, (prompt_len, max_tokens, can_stop, gap, cancel_after) in enumerate(arrivals, start=1):
        sequence = make_sequence(seq_id, prompt_len, max_tokens, can_stop=can_stop)
        prompt = [seq_id // 2, *sequence.spec.prompt_token_ids[1:]]  # so that each two begin alike
        ask(sequence, prompt_token_ids=prompt)
        prepare(sequence)
        cluster.scheduler.add(sequence)
        sequences.append(sequence)
        if cancel_after is not None:
            cancels.append([cancel_after, seq_id])
        for number in range(gap):
            num_steps += 1
            if num_steps in resets:
                cluster.attach_again()
            for cancel in cancels:
                cancel[0] -= 1
                if cancel[0] == 0:
                    cluster.scheduler.cancel(cancel[1])
            cluster.step(answer_opens=number % answer_every == 0)
    cluster.run_until_idle()
    return sequences, {seq_id for remaining, seq_id in cancels if remaining <= 0}


def check_outputs(sequences: list[Sequence], cancelled: set[int]) -> None:
    """Whoever was not cancelled in time has all its tokens, the others have some of the first ones."""
    for sequence in sequences:
        expected, is_cut = expected_output(sequence), sequence.seq_id in cancelled
        if is_cut and sequence.status is SequenceStatus.FINISHED:
            expected = expected[: len(sequence.output_token_ids)]
        assert sequence.output_token_ids == expected
