"""Drafts change the number of steps, but never the text, and they take nothing from other sequences."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.sampling_params import ReasoningLimit, SamplingParams
from services.dense_worker.engine.limits import Policy
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.features.drafting.drafting import Drafting
from services.step import SequenceOpened
from tests.support.dense.eager_drafting import EagerDrafting
from tests.support.dense.scheduler_cluster import (
    WINDOWS,
    Cluster,
    check_outputs,
    expected_output,
    make_sequence,
    next_token,
    requests,
    run_arrivals,
)
from tests.support.dense.sequences import ask
from tests.support.examples import examples


class SomeDrafts(EagerDrafting):
    """Proposes right drafts, except for every `one_wrong_in`-th position."""

    def __init__(self, num_tokens: int, one_wrong_in: int | None = None) -> None:
        super().__init__()
        self._num_tokens = num_tokens
        self._one_wrong_in = one_wrong_in

    def draft(self, sequence: Sequence, max_num_tokens: int) -> list[int]:
        assert not sequence.num_pending_tokens, "the previous tokens are not known yet"
        first = sequence.num_tokens
        drafts = []
        for position in range(first, first + min(self._num_tokens, max_num_tokens)):
            is_wrong = self._one_wrong_in is not None and position % self._one_wrong_in == 0
            drafts.append(next_token(sequence.seq_id, position) + is_wrong)
        return drafts


@settings(max_examples=examples(150), deadline=None)
@given(
    requests,
    st.sampled_from(["guaranteed_no_evict", "max_utilization", "take_turns"]),
    st.integers(16, 40),
    st.integers(1, 6),
    st.integers(6, 40),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 5)),
    st.sets(st.integers(1, 40), max_size=3),
    WINDOWS,
)
def test_every_sequence_gets_its_tokens_with_any_drafts(
    arrivals: list[tuple[int, int, bool, int, int | None]],
    policy: Policy,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    num_drafts: int,
    one_wrong_in: int | None,
    resets: set[int],
    kept: dict[str, int],
) -> None:
    drafting = SomeDrafts(num_drafts, one_wrong_in)
    cluster = Cluster(policy, num_blocks, max_num_seqs, max(budget, max_num_seqs), drafting=drafting, **kept)
    sequences, _ = run_arrivals(cluster, [(*each[:4], None) for each in arrivals], resets=resets)
    check_outputs(sequences, set())
    for plan in cluster.plans:
        assert sum(entry.num_logits for entry in plan.entries) <= max_num_seqs
    delivered: dict[int, list[int]] = {}
    for output in cluster.outputs:
        delivered.setdefault(output.sequence.seq_id, []).extend(output.token_ids)
    assert delivered == {sequence.seq_id: expected_output(sequence) for sequence in sequences}


@pytest.mark.parametrize(("num_drafts", "num_steps"), [(0, 24), (1, 12), (3, 6), (5, 4), (23, 1)])
def test_right_drafts_save_steps(num_drafts: int, num_steps: int) -> None:
    """Each step returns one more token than it has drafts."""
    cluster = Cluster(num_blocks=32, max_num_seqs=24, max_num_batched_tokens=64, drafting=SomeDrafts(num_drafts))
    sequence = make_sequence(1, 3, 24)
    cluster.scheduler.add(sequence)
    cluster.run_until_idle()
    assert sequence.output_token_ids == expected_output(sequence)
    assert sum(bool(plan.entries) for plan in cluster.plans) == num_steps
    assert sum(plan.num_tokens for plan in cluster.plans) == 3 + 24 - 1, "no token is computed twice"


def test_wrong_drafts_cost_no_step() -> None:
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64, drafting=SomeDrafts(3, one_wrong_in=1))
    sequence = make_sequence(1, 3, 24)
    cluster.scheduler.add(sequence)
    cluster.run_until_idle()
    assert sequence.output_token_ids == expected_output(sequence)
    assert sum(bool(plan.entries) for plan in cluster.plans) == 24


EXCLUDED = [
    SamplingParams(repetition_penalty=1.1),
    SamplingParams(frequency_penalty=0.5),
    SamplingParams(presence_penalty=0.5),
    SamplingParams(bad_words=((5, 6),)),
    SamplingParams(reasoning_limit=ReasoningLimit(max_tokens=4, end_token_id=9)),
]


@pytest.mark.parametrize("sampling", EXCLUDED)
def test_a_sequence_whose_logits_depend_on_previous_tokens_gets_no_drafts_beside_one_that_does(
    sampling: SamplingParams,
) -> None:
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64, drafting=SomeDrafts(3))
    sequences = [make_sequence(seq_id, 3, 12) for seq_id in (1, 2)]
    ask(sequences[0], sampling=sampling)
    for sequence in sequences:
        cluster.scheduler.add(sequence)
    cluster.run_until_idle()
    drafted = {entry.seq_id for plan in cluster.plans for entry in plan.entries if entry.draft_token_ids}
    assert drafted == {2}
    assert any(len(plan.entries) == 2 and plan.entries.drafts for plan in cluster.plans), "in one step"
    assert [sequence.output_token_ids for sequence in sequences] == [expected_output(each) for each in sequences]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.8, seed=3, top_k=5, top_p=0.9, min_p=0.1),
        SamplingParams(min_tokens=4),
        SamplingParams(logit_bias=((5, 2.0),)),
        SamplingParams(allowed_token_ids=(1, 2, 3)),
    ],
)
def test_other_options_have_drafts(sampling: SamplingParams) -> None:
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64, drafting=SomeDrafts(3))
    sequence = make_sequence(1, 3, 12)
    ask(sequence, sampling=sampling)
    cluster.scheduler.add(sequence)
    cluster.run_until_idle()
    assert any(plan.entries.drafts for plan in cluster.plans)


class Ended(Drafting):
    """Notes which sequences have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.seq_ids: list[int] = []

    def finish(self, sequence: Sequence) -> None:
        self.seq_ids.append(sequence.seq_id)


def test_it_hears_once_of_each_end_also_of_sequences_that_are_cancelled_or_cannot_be_opened() -> None:
    drafting = Ended()
    cluster = Cluster(drafting=drafting)
    scheduler = cluster.scheduler
    for seq_id in (1, 2, 3, 4):
        scheduler.add(make_sequence(seq_id, 3, 4))
    assert len(scheduler.next_to_open()) == 4
    scheduler.cancel(2)
    assert drafting.seq_ids == [2]
    for seq_id in (1, 2):
        scheduler.opened(SequenceOpened(seq_id, error="damaged"))
    assert drafting.seq_ids == [2, 1]
    for seq_id in (3, 4):
        scheduler.opened(SequenceOpened(seq_id))
        scheduler.cancel(seq_id)
    assert drafting.seq_ids == [2, 1, 3, 4]


def test_a_full_batch_has_no_drafts() -> None:
    cluster = Cluster(max_num_seqs=4, max_num_batched_tokens=64, num_blocks=64, drafting=SomeDrafts(3))
    for seq_id in range(1, 5):
        cluster.scheduler.add(make_sequence(seq_id, 3, 12))
    for _ in range(6):
        cluster.step()
    full = [plan for plan in cluster.plans if len(plan.entries) == 4]
    assert full and not any(plan.entries.drafts for plan in full)
