"""Without speculation: steps have the tokens that a form forces, where that takes less time, and no plain sequence
notices it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config import SchedulerSection
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.features.drafting import load_drafter
from services.dense_worker.features.drafting.drafter import MAX_FORCED
from services.dense_worker.features.drafting.drafting import Drafting
from services.dense_worker.features.drafting.measured_drafting import ForcedDrafting
from services.dense_worker.features.drafting.step_costs import StepCosts
from services.dense_worker.features.sequence_feature import SequenceFeature
from tests.support.dense.scheduler_cluster import (
    check_outputs,
    expected_output,
    make_sequence,
    next_token,
    requests,
    run_arrivals,
)
from tests.support.examples import examples
from tests.unit.dense_worker.features.drafting.test_measured_drafting import COSTS, FreeSteps, TimedCluster


class Form(SequenceFeature):
    """Of each `period` output tokens, the model chooses the first one and the form forces the others."""

    forces_tokens = True

    def __init__(self, sequence: Sequence, period: int) -> None:
        self._sequence, self._period = sequence, period
        sequence.features = (*sequence.features, self)

    @property
    def forced_token_ids(self) -> list[int]:
        sequence, forced = self._sequence, list[int]()
        for number in range(len(sequence.output_token_ids), sequence.spec.max_tokens - 1):
            if number % self._period == 0:
                break
            forced.append(next_token(sequence.seq_id, sequence.num_prompt_tokens + number))
        return forced


def make_drafting() -> ForcedDrafting:
    return ForcedDrafting(StepCosts(32, 64))


def run(drafting: Drafting, costs: str, periods: list[int | None], num_answers: int = 8) -> TimedCluster:
    """Answers of 60 tokens, with forms or without one, as many at a time as there are periods."""
    cluster = TimedCluster(drafting, *COSTS[costs])
    sequences = []
    for seq_id in range(1, 1 + num_answers):
        sequences.append(make_sequence(seq_id, 4, 60))
        if (period := periods[seq_id % len(periods)]) is not None:
            Form(sequences[-1], period)
        cluster.scheduler.add(sequences[-1])
        while cluster.scheduler.num_running + cluster.scheduler.num_waiting >= len(periods):
            cluster.step()
    cluster.run_until_idle()
    assert [each.output_token_ids for each in sequences] == [expected_output(each) for each in sequences]
    return cluster


def test_models_whose_states_cannot_go_back_get_no_drafts() -> None:
    without: Any = SimpleNamespace(recurrent_layers={})
    some: Any = SimpleNamespace(recurrent_layers={1: None})
    assert type(load_drafter.make_drafting(SchedulerSection(), without, None)) is ForcedDrafting
    assert type(load_drafter.make_drafting(SchedulerSection(), some, None)) is Drafting


def test_plans_without_a_form_are_those_of_a_server_that_drafts_nothing() -> None:
    drafting = make_drafting()
    found, expected = (run(each, "gpu", [None, None, None]) for each in (drafting, Drafting()))
    assert found.plans == expected.plans and found.time_s == expected.time_s
    assert not drafting._costs._costs, "and nothing is measured"


@pytest.mark.parametrize(("period", "gain"), [(2, 1.4), (4, 2.3), (12, 4.0)])
def test_forced_tokens_take_no_step_of_their_own(period: int, gain: float) -> None:
    found, expected = (run(each, "gpu", [period]) for each in (make_drafting(), Drafting()))
    assert expected.time_s > gain * found.time_s
    assert found.counts.num_draft_tokens == found.counts.num_accepted_tokens
    most = max(len(entry.draft_token_ids) for plan in found.plans for entry in plan.entries)
    assert most == min(period - 1, MAX_FORCED)


@pytest.mark.parametrize("periods", [[1], [1, None, 1, None], [2, None, None, 3]])
@pytest.mark.parametrize("costs", COSTS)
def test_answers_take_at_most_3_percent_longer(costs: str, periods: list[int | None]) -> None:
    """Where nothing is forced, or tokens cost too much."""
    drafting = make_drafting()
    run(drafting, costs, periods, 4)  # it learns the costs of steps once
    assert run(drafting, costs, periods).time_s <= 1.03 * run(Drafting(), costs, periods).time_s


def test_streams_without_a_form_keep_their_rows_beside_those_with_one() -> None:
    cluster = TimedCluster(make_drafting(), *COSTS["gpu"])
    plain, formed = make_sequence(1, 4, 60), make_sequence(2, 4, 60)
    Form(formed, 4)
    for sequence in (plain, formed):
        cluster.scheduler.add(sequence)
    for _ in range(20):
        cluster.step()
        assert formed.slot is None
    assert plain.slot is not None
    cluster.run_until_idle()
    assert [each.output_token_ids for each in (plain, formed)] == [expected_output(plain), expected_output(formed)]


def test_forms_are_planned_like_plain_streams_while_there_is_no_room_for_drafts_that_may_pay() -> None:
    drafting = make_drafting()
    cluster = TimedCluster(drafting, *COSTS["gpu"], max_num_seqs=8)
    sequences = [make_sequence(seq_id, 4, 20 if seq_id > 6 else 60) for seq_id in range(1, 9)]
    for sequence in sequences:
        Form(sequence, 4)
        cluster.scheduler.add(sequence)
    has_row = list[bool]()
    while cluster.scheduler.num_running != 6:
        cluster.step()
        has_row.append(all(each.slot is not None for each in sequences))
    assert has_row[5:-1] and all(has_row[5:-1]), "from their second token on"
    assert not drafting.counts.num_drafts
    cluster.scheduler.add(make_sequence(9, 4, 60))  # it has no form
    for _ in range(5):
        cluster.step()
    assert all(each.slot is not None for each in sequences[:6]), "there is room for one draft again"
    cluster.scheduler.cancel(9)
    cluster.run_until_idle()
    assert [each.output_token_ids for each in sequences] == [expected_output(each) for each in sequences]
    assert drafting.counts.num_drafts > 0, "two for six streams, which may pay"


@settings(max_examples=examples(40), deadline=None)
@given(
    requests,
    st.lists(st.sampled_from([None, 1, 2, 5]), min_size=14, max_size=14),
    st.integers(16, 40),
    st.integers(1, 6),
    st.integers(6, 40),
    st.sets(st.integers(1, 40), max_size=3),
)
def test_every_sequence_gets_its_tokens(
    arrivals: list[tuple[int, int, bool, int, int | None]],
    periods: list[int | None],
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    resets: set[int],
) -> None:
    """With preemptions, new attachments and cancelled sequences, where drafts always pay."""
    budget = max(budget, max_num_seqs)
    drafting = ForcedDrafting(FreeSteps(max_num_seqs, budget))
    sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, "num_blocks": num_blocks}
    cluster = TimedCluster(drafting, 0.1, 0.1, **sizes)

    def give_form(sequence: Sequence) -> None:
        if (period := periods[sequence.seq_id - 1]) is not None:
            Form(sequence, period)

    check_outputs(*run_arrivals(cluster, arrivals, resets=resets, prepare=give_form))
    assert not drafting._predictors, "it keeps nothing of sequences that have ended"
