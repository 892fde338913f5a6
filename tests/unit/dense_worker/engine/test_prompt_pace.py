"""Steps of the real scheduler on a machine whose time is simulated: streams do not wait long for steps with prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import ScheduledStep
from services.dense_worker.engine.step_planner import FIRST_PROMPT_TOKENS, MAX_STEP_S, MIN_PROMPT_TOKENS
from services.step import StepPlan
from tests.support.dense.scheduler_cluster import Cluster, expected_output, make_sequence, new_attachment
from tests.support.dense.sequences import ask
from tests.support.examples import examples

BUDGET, PROMPT_LEN = 512, 2000


class TimedCluster(Cluster):
    """Steps take as long as `time_of` says; `durations` has them in order, as `plans` has the plans."""

    def __init__(self, time_of: Callable[[StepPlan], float], *, measures_steps: bool = True, **options: Any) -> None:
        sizes = {"num_blocks": 6000, "max_num_seqs": 16, "max_num_batched_tokens": BUDGET, "max_model_len": 2100}
        super().__init__(**sizes | options)
        self.limits = SchedulerLimits(
            self.limits.max_num_seqs, BUDGET, 2100, 1000, "guaranteed_no_evict", measures_steps=measures_steps
        )
        self.scheduler = Scheduler(self.limits)
        self.scheduler.begin(new_attachment(self.cache))
        self.durations: list[float] = []
        self._time_of, self._now_s = time_of, 1000.0

    def _complete(self, published: ScheduledStep) -> None:
        published.launch_start_s = self._now_s
        self.durations.append(self._time_of(published.plan))
        self._now_s += self.durations[-1]
        published.end_s = self._now_s
        super()._complete(published)

    def add(self, seq_id: int, prompt_len: int, max_tokens: int, client: int = 0) -> Sequence:
        sequence = make_sequence(seq_id, prompt_len, max_tokens)
        ask(sequence, client=client)
        self.scheduler.add(sequence)
        return sequence

    def run_streams(self, num_streams: int, num_tokens: int = 60) -> list[Sequence]:
        """Streams that have begun to decode."""
        streams = [self.add(seq_id, 3, num_tokens) for seq_id in range(1, num_streams + 1)]
        while not all(each.output_token_ids for each in streams):
            self.step()
        return streams


def num_prompt_tokens(plan: StepPlan) -> int:
    """Of all entries that are no rows of streams."""
    return int(plan.entries.num_tokens[plan.entries.num_tokens > 1].sum())


@pytest.mark.parametrize("s_per_token", [0.0001, 0.0006, 0.0013])
@pytest.mark.parametrize("num_clients", [1, 3])
def test_steps_of_streams_beside_long_prompts_are_short(s_per_token: float, num_clients: int) -> None:
    cluster = TimedCluster(lambda plan: 0.002 + s_per_token * plan.num_tokens)
    streams = cluster.run_streams(4)
    num_before = len(cluster.plans)
    prompts = [cluster.add(10 + number, PROMPT_LEN, 3, client=number % num_clients) for number in range(3)]
    cluster.run_until_idle()
    assert all(each.output_token_ids == expected_output(each) for each in (*streams, *prompts))
    counts = [num_prompt_tokens(plan) for plan in cluster.plans[num_before:] if len(plan.entries) > 4]
    first_s = 0.002 + s_per_token * (FIRST_PROMPT_TOKENS + 4)
    assert max(cluster.durations[num_before:]) <= max(MAX_STEP_S, first_s) + 1e-9
    fitting = min(BUDGET - 4, int((MAX_STEP_S - 0.002) / s_per_token) - 4)
    assert max(counts) >= 0.9 * fitting, "a step is as long as it may be"


def test_streams_that_give_way_to_a_new_client_wait_for_two_short_steps() -> None:
    cluster = TimedCluster(lambda plan: 0.001 * plan.num_tokens)
    streams = cluster.run_streams(10)
    num_before = len(cluster.plans)
    cluster.add(20, PROMPT_LEN, 3, client=1)
    cluster.run_until_idle()
    assert all(each.output_token_ids == expected_output(each) for each in streams)
    gaps, has_given_way = [0.0], False
    for plan, duration in zip(cluster.plans[num_before:], cluster.durations[num_before:], strict=False):
        gaps[-1] += duration
        if streams[0].seq_id in plan.entries.seq_ids:
            gaps.append(0.0)
        has_given_way |= bool(len(plan.entries)) and 1 not in plan.entries.seq_ids and gaps[-1] > 0.1
    assert has_given_way and max(gaps) <= 2 * MAX_STEP_S


def test_a_step_that_is_slow_however_few_tokens_it_has_still_computes_some() -> None:
    cluster = TimedCluster(lambda plan: 3.0)
    streams = cluster.run_streams(10)
    num_before = len(cluster.plans)
    prompt = cluster.add(20, 700, 2)
    cluster.run_until_idle()
    assert all(each.output_token_ids == expected_output(each) for each in (*streams, prompt))
    counts = [num_prompt_tokens(plan) for plan in cluster.plans[num_before:] if num_prompt_tokens(plan)]
    assert counts[0] == FIRST_PROMPT_TOKENS and set(counts[2:-1]) == {MIN_PROMPT_TOKENS}, counts


def test_one_slow_step_makes_the_next_ones_short_for_a_while() -> None:
    durations = iter([0.01] * 3 + [0.02, 5.0] + [0.02] * 200)
    cluster = TimedCluster(lambda plan: next(durations))
    cluster.run_streams(1, num_tokens=90)
    cluster.add(9, PROMPT_LEN, 1)
    num_before = len(cluster.plans)
    cluster.run_until_idle()
    counts = [num_prompt_tokens(plan) for plan in cluster.plans[num_before:] if num_prompt_tokens(plan)]
    assert counts.count(MIN_PROMPT_TOKENS) == 8 and counts[-1] > 4 * MIN_PROMPT_TOKENS, counts


def test_steps_without_prompts_say_nothing_of_their_pace() -> None:
    cluster = TimedCluster(
        lambda plan: 0.01 if num_prompt_tokens(plan) else 5.0, max_num_seqs=MIN_PROMPT_TOKENS + 10
    )
    cluster.run_streams(MIN_PROMPT_TOKENS + 2)
    num_before = len(cluster.plans)
    cluster.add(99, PROMPT_LEN, 1)
    cluster.run_until_idle()
    counts = [num_prompt_tokens(plan) for plan in cluster.plans[num_before:] if num_prompt_tokens(plan)]
    assert min(counts[:-1]) >= FIRST_PROMPT_TOKENS, counts


def test_work_between_steps_says_nothing_of_the_pace_of_prompts() -> None:
    cluster = TimedCluster(lambda plan: 0.01)
    cluster.run_streams(2)
    num_before = len(cluster.plans)
    cluster.add(9, PROMPT_LEN, 1)
    for _ in range(3):
        cluster.step()
        session = cluster.scheduler.session
        session.last_step_s, session.has_provided = 5.0, True  # the picture of another request was encoded meanwhile
    cluster.run_until_idle()
    counts = [num_prompt_tokens(plan) for plan in cluster.plans[num_before:] if num_prompt_tokens(plan)]
    assert min(counts[:-1]) >= FIRST_PROMPT_TOKENS, counts


@pytest.mark.parametrize("measures_steps", [True, False])
def test_prompts_alone_and_prompts_on_a_gpu_have_the_whole_budget(measures_steps: bool) -> None:
    cluster = TimedCluster(lambda plan: 2.0, measures_steps=measures_steps)
    if not measures_steps:
        cluster.run_streams(1)
    num_before = len(cluster.plans)
    cluster.add(9, PROMPT_LEN, 1)
    cluster.run_until_idle()
    num_streams = int(not measures_steps)
    counts = [num_prompt_tokens(plan) for plan in cluster.plans[num_before:] if num_prompt_tokens(plan)]
    assert counts[:3] == [BUDGET - num_streams] * 3


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.floats(0.0, 30.0), min_size=1, max_size=20), st.integers(1, 3), st.integers(0, 2))
def test_no_time_that_a_step_takes_changes_a_token(
    durations: list[float], num_clients: int, num_streams: int
) -> None:
    number = 0

    def time_of(plan: StepPlan) -> float:
        nonlocal number
        number += 1
        return durations[number % len(durations)]

    cluster = TimedCluster(time_of)
    sequences = cluster.run_streams(num_streams, num_tokens=20)
    sequences += [cluster.add(10 + i, 150 * i + 5, 4, client=i % num_clients) for i in range(5)]
    cluster.run_until_idle()
    assert all(each.output_token_ids == expected_output(each) for each in sequences)
