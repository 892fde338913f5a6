"""Beam searches in the scheduler, with the real KV cache accounting and a simulated model.

The model's log-probabilities are a function of all tokens of a beam. So a search finds other answers if a beam is ever
forked from the wrong one, or gets the wrong token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.beams.options import BeamSearchOptions, EarlyStopping
from services.common.errors import InvalidRequest
from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.engine.limits import Policy
from services.dense_worker.engine.sequence import FinishReason, Sequence, SequenceStatus
from services.dense_worker.engine.session import ScheduledStep
from services.dense_worker.features.beams.beam_policy import AnswersReport, BeamPolicy
from services.dense_worker.features.beams.search import BeamSearch, Hypothesis
from services.step import PlanAccepted, StepPlan, StepResult
from tests.support.dense.scheduler_cluster import Cluster, expected_output, make_sequence, sample
from tests.support.dense.sequences import ask
from tests.support.examples import examples

NUM_TOKENS = 24  # of the vocabulary
STOP_TOKENS = frozenset([3, 11])
FIRST_ID, ID_GAP = 1000, 16  # of searches: each has an id for every beam


def logprobs_after(token_ids: SequenceOf[int]) -> TokenLogprobs:
    """All tokens with their log-probabilities after these, the most likely one first."""
    rng = random.Random(repr(list(token_ids)))
    pairs = [(token_id, -5.0 * rng.random()) for token_id in range(NUM_TOKENS)]
    return TokenLogprobs(0.0, tuple(sorted(pairs, key=lambda pair: -pair[1])))


def expected_hypotheses(sequence: Sequence) -> list[Hypothesis]:
    """The answers of a search that is never interrupted."""
    spec = sequence.spec
    assert spec.beam_search is not None
    search = BeamSearch(spec.beam_search, spec.max_tokens, frozenset(spec.stop_token_ids))
    while not search.is_done:
        search.advance([logprobs_after(spec.prompt_token_ids + beam.token_ids) for beam in search.beams])
    return search.hypotheses


def make_search(number: int, prompt_len: int, max_tokens: int, num_beams: int, **options: object) -> Sequence:
    sequence = make_sequence(FIRST_ID + ID_GAP * number, prompt_len, max_tokens)
    ask(sequence, stop_token_ids=STOP_TOKENS, beam_search=BeamSearchOptions(num_beams, num_beams, **options))
    sequence.policy = BeamPolicy(sequence.seq_id, sequence.spec)
    return sequence


class BeamCluster(Cluster):
    """Also follows the tokens of each beam, as a runner does."""

    def __init__(self, *arguments: object, **limits: object) -> None:
        super().__init__(*arguments, **limits)
        self.tokens: dict[int, list[int]] = {}  # of searches, by id of the beam

    def answer_opens(self) -> None:
        for sequence in self._opening:
            if sequence.policy is not None:
                self.tokens[sequence.seq_id] = list(sequence.describe().token_ids)
        super().answer_opens()

    def _complete(self, published: ScheduledStep) -> None:
        plan = published.plan
        self.open_starting(plan)
        step = self.cache.plan_step(plan)
        assert not step.errors, "both sides must agree on lengths and blocks"
        self.cache.commit_step()
        logprobs = self.follow(plan)
        for entry in plan.entries:
            if entry.seq_id in self.tokens:
                assert list(self.cache._sequences[entry.seq_id].token_ids) == self.tokens[entry.seq_id]
        if plan.frees_blocks:
            self.outputs += self.scheduler.accepted(PlanAccepted(plan.step_id, step.num_freed_blocks))
        self.outputs += self.scheduler.update(published, StepResult(sample(plan).token_ids, logprobs))

    def check(self, plan: StepPlan) -> None:
        """Without the order of entries: several clients share a step, in which any prompt may get a single token."""
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert len(plan.entries) <= self.limits.max_num_seqs
        assert len({entry.seq_id for entry in plan.entries}) == len(plan.entries)

    def follow(self, plan: StepPlan) -> dict[int, list[TokenLogprobs]]:
        """Applies a plan to the tokens; the log-probabilities of the next ones."""
        for seq_id in plan.close_seq_ids:
            self.tokens.pop(seq_id, None)
        for new in plan.new_sequences:
            if new.starts_empty and new.seq_id >= FIRST_ID:
                self.tokens[new.seq_id] = list(new.token_ids)
        for fork in plan.forks:
            assert fork.child_seq_id not in self.tokens
            self.tokens[fork.child_seq_id] = self.tokens[fork.parent_seq_id][: fork.position]
        for seq_id, token_id in plan.forced:
            self.tokens[seq_id].append(token_id)
        logprobs = {}
        for entry in plan.entries:
            if entry.seq_id in self.tokens and entry.num_logits:
                assert len(self.tokens[entry.seq_id]) == entry.position + entry.num_tokens
                logprobs[entry.seq_id] = [logprobs_after(self.tokens[entry.seq_id])]
        return logprobs

    def check_answers(self, searches: SequenceOf[Sequence]) -> None:
        """Every search ended once, with the right answers."""
        ends = [each for each in self.outputs if each.finish_reason is not None and each.sequence.policy is not None]
        assert sorted(each.sequence.seq_id for each in ends) == [each.seq_id for each in searches]
        for end in ends:
            assert end.finish_reason is not FinishReason.ERROR
            assert isinstance(end.report, AnswersReport)
            assert list(end.report.hypotheses) == expected_hypotheses(end.sequence)


arrivals = st.lists(
    st.tuples(
        st.integers(1, 14),  # prompt
        st.integers(1, 9),  # max_tokens
        st.integers(1, 4),  # beams; 1: a sequence that samples
        st.integers(0, 3),  # steps before the next request
        st.one_of(st.none(), st.none(), st.integers(1, 12)),  # steps after which it is cancelled
        st.integers(0, 2),  # client
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=examples(150), deadline=None)
@given(
    arrivals,
    st.sampled_from(["guaranteed_no_evict", "max_utilization", "take_turns"]),
    st.integers(24, 48),
    st.integers(4, 8),
    st.integers(8, 24),
    st.integers(1, 3),
    st.sets(st.integers(1, 40), max_size=3),
    st.sampled_from(EarlyStopping),
    st.sampled_from([{}, {"window": 6}, {"layer_window": 6}]),
)
def test_every_search_finds_its_answers_and_every_block_is_freed(
    requests: list[tuple[int, int, int, int, int | None, int]],
    policy: Policy,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    answer_every: int,
    resets: set[int],
    stopping: EarlyStopping,
    window: dict[str, int],
) -> None:
    cluster = BeamCluster(policy, num_blocks, max_num_seqs, budget, **window)
    sequences: list[Sequence] = []
    cancels, num_steps = dict[int, list[Sequence]](), 0
    for number, (prompt_len, max_tokens, num_beams, gap, cancel_after, client) in enumerate(requests, start=1):
        if num_beams == 1:
            sequence = make_sequence(number, prompt_len, max_tokens)
        else:
            sequence = make_search(number, prompt_len, max_tokens, num_beams, early_stopping=stopping)
        ask(sequence, client=client)
        try:
            cluster.scheduler.add(sequence)
        except InvalidRequest as error:
            assert "KV cache blocks" in str(error)
            continue
        sequences.append(sequence)
        if cancel_after is not None:
            cancels.setdefault(num_steps + cancel_after, []).append(sequence)
        for index in range(gap):
            num_steps += 1
            for each in cancels.pop(num_steps, ()):
                if each.status is not SequenceStatus.FINISHED:
                    cluster.scheduler.cancel(each.seq_id)
                    sequences.remove(each)
            if num_steps in resets:
                cluster.attach_again()
            cluster.step(answer_opens=index % answer_every == 0)
    cluster.run_until_idle()
    kept = set(sequences)
    cluster.outputs = [each for each in cluster.outputs if each.sequence in kept]
    cluster.check_answers([each for each in sequences if each.policy is not None])
    for sequence in sequences:
        if sequence.policy is None:
            assert sequence.output_token_ids == expected_output(sequence)


@pytest.mark.parametrize("prompt_len", [1, 7, 8, 9])
def test_a_step_is_one_step_for_all_beams_and_the_prompt_is_computed_once(prompt_len: int) -> None:
    cluster = BeamCluster(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
    search = make_search(0, prompt_len, 8, 4, early_stopping=EarlyStopping.NEVER)
    cluster.scheduler.add(search)
    cluster.run_until_idle()
    cluster.check_answers([search])
    [prompt, *steps] = [plan.entries for plan in cluster.plans if plan.entries]
    assert [entry.num_tokens for entry in prompt] == [prompt_len]
    assert steps and all([entry.num_tokens for entry in entries] == [1] * 4 for entries in steps)
    assert len(steps) <= 7, "the last token of an answer is never computed"


def test_beams_share_all_blocks_but_the_one_in_which_they_differ() -> None:
    """Four beams behind a prompt of 40 tokens need no more than one copy of it, and the blocks of their own tokens."""
    cluster = BeamCluster(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
    cluster.scheduler.add(make_search(0, 40, 8, 4, early_stopping=EarlyStopping.NEVER))
    most = 0
    for _ in range(40):
        cluster.step()
        most = max(most, cluster.cache.num_used_blocks)
        num_beams = len(cluster.cache.orphaned_blocks)
        assert cluster.cache.num_used_blocks <= 10 + num_beams * 2
    assert most >= 10 + 4
    cluster.run_until_idle()


def test_dead_beams_are_closed_in_the_plan_that_forks_their_successors() -> None:
    cluster = BeamCluster(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
    cluster.scheduler.add(make_search(0, 6, 9, 4, early_stopping=EarlyStopping.NEVER))
    cluster.run_until_idle()
    forking = [plan for plan in cluster.plans if plan.forks]
    assert len(forking) > 1
    for plan in forking[1:]:
        assert {fork.child_seq_id for fork in plan.forks} == set(plan.close_seq_ids)


def test_a_search_counts_as_many_places_as_it_has_beams() -> None:
    cluster = BeamCluster(num_blocks=128, max_num_seqs=6, max_num_batched_tokens=64)
    searches = [make_search(number, 5, 9, 4, early_stopping=EarlyStopping.NEVER) for number in range(2)]
    for search in searches:
        cluster.scheduler.add(search)
    for _ in range(4):
        cluster.step()
    assert [search.status for search in searches] == [SequenceStatus.RUNNING, SequenceStatus.WAITING]
    cluster.run_until_idle()
    cluster.check_answers(searches)
    assert all(len(plan.entries) <= 6 for plan in cluster.plans)


def test_other_streams_go_on_beside_a_search_as_wide_as_it_may_be() -> None:
    """They get a token in every step from the second one on, and none of them is preempted."""
    cluster = BeamCluster(num_blocks=256, max_num_seqs=8, max_num_batched_tokens=16)
    streams = [make_sequence(number, 4, 20) for number in (1, 2)]
    search = make_search(0, 4, 20, 6, early_stopping=EarlyStopping.NEVER)
    for sequence in (search, *streams):
        ask(sequence, client=min(sequence.seq_id, FIRST_ID))
        cluster.scheduler.add(sequence)
    cluster.run_until_idle()
    assert cluster.scheduler.num_preemptions == 0
    rows = [[entry.seq_id for entry in plan.entries] for plan in cluster.plans]
    first = next(index for index, ids in enumerate(rows) if 1 in ids and 2 in ids)
    assert all({1, 2} <= set(ids) for ids in rows[first : first + 20])
    cluster.check_answers([search])


def test_a_search_may_not_reserve_more_than_half_of_the_cache() -> None:
    cluster = BeamCluster(num_blocks=40, max_num_seqs=8, max_num_batched_tokens=16)
    with pytest.raises(InvalidRequest, match=r"8 beams .* may need 49 KV cache blocks, a search may have 20 of 40"):
        cluster.scheduler.add(make_search(0, 4, 21, 8))


def test_more_beams_than_places_are_refused() -> None:
    cluster = BeamCluster(num_blocks=64, max_num_seqs=4)
    with pytest.raises(InvalidRequest, match="there are 5 beams, max_num_seqs is 4"):
        cluster.scheduler.add(make_search(0, 4, 2, 5))


def test_a_failed_beam_ends_its_search_alone() -> None:
    cluster = BeamCluster(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
    search, other = make_search(0, 6, 9, 4, early_stopping=EarlyStopping.NEVER), make_sequence(1, 6, 9)
    for sequence in (search, other):
        cluster.scheduler.add(sequence)
    while not (cluster.in_flight and any(plan.forks for plan in cluster.plans)):
        cluster.step()
    published = cluster.in_flight
    failed = next(entry for entry in published.plan.entries if entry.seq_id == search.seq_id + 2)
    cluster.in_flight = None
    step = cluster.cache.plan_step(published.plan)
    cluster.cache.commit_step()
    # As if the cache had refused the entry: what was taken for it comes back with the answer.
    [(_, num_taken)] = published.taken_blocks(failed.seq_id)
    cluster.scheduler.session.ledger.take(num_taken)
    outputs = cluster.scheduler.accepted(
        PlanAccepted(published.plan.step_id, step.num_freed_blocks, errors={failed.seq_id: "no room"})
    )
    assert [(each.sequence, each.finish_reason) for each in outputs] == [(search, FinishReason.ERROR)]
    logprobs = cluster.follow(published.plan)
    cluster.scheduler.update(published, StepResult(sample(published.plan).token_ids, logprobs))
    cluster.run_until_idle()
    assert other.output_token_ids == expected_output(other)
