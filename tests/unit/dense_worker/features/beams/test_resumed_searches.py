"""Beam searches that lose the KV cache, or their dense worker, and go on from their beams."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.beams.options import BeamSearchOptions, EarlyStopping
from services.common.errors import InvalidRequest
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.features.beams.add_beams import add_beams
from services.dense_worker.features.beams.beam_policy import AnswersReport, BeamPolicy, SearchReport
from services.dense_worker.features.beams.search import BeamSearch, SearchState
from services.gateway.link.search_record import SearchRecord
from services.pb import dense_pb2
from tests.support.dense.scheduler_cluster import make_sequence, new_attachment
from tests.support.dense.sequences import ask
from tests.support.examples import examples
from tests.unit.dense_worker.features.beams.test_scheduler_beams import (
    NUM_TOKENS,
    BeamCluster,
    expected_hypotheses,
    logprobs_after,
    make_search,
)


class LossyCluster(BeamCluster):
    """One search whose steps a gateway records, and whose dense worker or KV cache dies."""

    def __init__(self, search: Sequence, *, num_logprobs: int | None = None, **limits: object) -> None:
        self._new_cluster = lambda: BeamCluster(num_blocks=128, max_num_seqs=8, **limits)
        super().__init__(num_blocks=128, max_num_seqs=8, **limits)
        self.search = search
        ask(search, num_logprobs=num_logprobs)
        search.policy = BeamPolicy(search.seq_id, search.spec)
        self.record = SearchRecord(search.policy.num_rows)
        self.num_recorded = 0
        self.scheduler.add(search)

    def record_steps(self) -> None:
        for output in self.outputs[self.num_recorded :]:
            if isinstance(output.report, SearchReport):
                self.record.add(output.report.encode())
        self.num_recorded = len(self.outputs)

    def replace_worker(self, *, is_cache_lost: bool) -> None:
        """A new dense worker gets the search as the gateway knows it; the other one's plan in flight is lost."""
        self.record_steps()
        self.in_flight = None
        self._opening.clear()
        if is_cache_lost:
            self.cache = self._new_cluster().cache
        self.tokens.clear()
        self.scheduler = Scheduler(self.limits)
        self.scheduler.begin(new_attachment(self.cache))
        beams, ended = self.record.encode()
        self.search = Sequence(self.search.seq_id, self.search.spec)
        message = dense_pb2.BeamProgress(has_run=True, beams=beams, ended=ended)
        add_beams(self.search, dense_pb2.BeamProgress.FromString(message.SerializeToString()), NUM_TOKENS)
        self.scheduler.add(self.search)
        self.scheduler.close_orphans()


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(1, 14),
    st.integers(2, 12),
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=4),
    st.integers(4, 24),
    st.sampled_from(EarlyStopping),
    st.sampled_from([{}, {"window": 6}, {"layer_window": 6}]),
    st.booleans(),
    st.sampled_from([None, 2]),
)
def test_a_search_finds_the_same_answers_in_whatever_workers_it_runs(
    prompt_len: int,
    max_tokens: int,
    num_beams: int,
    deaths: list[tuple[int, bool]],
    budget: int,
    stopping: EarlyStopping,
    window: dict[str, int],
    enable_prefix_cache: bool,
    num_logprobs: int | None,
) -> None:
    search = make_search(0, prompt_len, max_tokens, num_beams, early_stopping=stopping)
    expected = expected_hypotheses(search)
    limits = {"max_num_batched_tokens": budget, **window, "enable_prefix_cache": enable_prefix_cache}
    cluster = LossyCluster(search, num_logprobs=num_logprobs, **limits)
    for num_steps, is_cache_lost in deaths:
        for _ in range(num_steps):
            cluster.step()
        if any(output.finish_reason is not None for output in cluster.outputs):
            break
        cluster.replace_worker(is_cache_lost=is_cache_lost)
    cluster.run_until_idle()
    [end] = [output.report for output in cluster.outputs if output.finish_reason is not None]
    assert isinstance(end, AnswersReport)
    assert [(each.token_ids, each.is_stopped) for each in end.hypotheses] == [
        (each.token_ids, each.is_stopped) for each in expected
    ]
    assert [each.score for each in end.hypotheses] == [each.score for each in expected]
    if num_logprobs is not None:
        found = [[logprobs.logprob for logprobs in each.logprobs] for each in end.hypotheses]
        assert found == [pytest.approx([logprobs.logprob for logprobs in each.logprobs]) for each in expected]
        assert {len(logprobs.top) for each in end.hypotheses for logprobs in each.logprobs} == {num_logprobs}


def search_of_two_beams(**asked: object) -> Sequence:
    """A search of two beams that has not run yet."""
    sequence = make_sequence(1, 4, 8)
    sequence.spec = replace(sequence.spec, beam_search=BeamSearchOptions(2, 2), **asked)
    return sequence


@pytest.mark.parametrize("is_cache_lost", [True, False])
def test_no_step_of_a_search_is_repeated(is_cache_lost: bool) -> None:
    """After it has lost everything, its tokens are computed in few steps with many tokens each."""
    search = make_search(0, 9, 30, 4, early_stopping=EarlyStopping.NEVER, length_penalty=2.0)
    ask(search, stop_token_ids=())
    cluster = LossyCluster(search, max_num_batched_tokens=64)
    while len(cluster.outputs) < 20:
        cluster.step()
    cluster.replace_worker(is_cache_lost=is_cache_lost)
    first = len(cluster.plans)
    while len(cluster.outputs) < 21:
        cluster.step()
    plans = [plan for plan in cluster.plans[first:] if plan.entries]
    most = 9 + 4 * 20  # the prompt, and the tokens of each beam
    assert sum(plan.num_tokens for plan in plans) <= most and len(plans) <= 4
    cluster.run_until_idle()
    num_steps = sum(isinstance(output.report, SearchReport) for output in cluster.outputs)
    assert num_steps == 29, "each token was chosen once"


@pytest.mark.parametrize(
    ("beams", "num_ended", "words"),
    [
        ([[1], [2, 3]], 0, r"have \[1, 2\] tokens, all must have as many, from 1 to max_tokens - 1, which is 7"),
        ([[], []], 0, r"have \[0\] tokens"),
        ([[1] * 8, [2] * 8], 0, r"have \[8\] tokens"),
        ([[1], [2], [3]], 0, "a search has 3 beams, num_beams is 2"),
        ([[1], [2]], 3, "a search has 3 ended answers, num_beams is 2"),
    ],
)
def test_beams_that_no_search_has_are_refused(beams: list[list[int]], num_ended: int, words: str) -> None:
    message = dense_pb2.BeamProgress(
        beams=[dense_pb2.Beam(token_ids=token_ids) for token_ids in beams],
        ended=[dense_pb2.BeamAnswer(token_ids=[1])] * num_ended,
    )
    with pytest.raises(InvalidRequest, match=words):
        add_beams(search_of_two_beams(), message, NUM_TOKENS)


@pytest.mark.parametrize(
    ("beam", "num_logprobs", "words"),
    [
        ({"token_ids": [5, NUM_TOKENS]}, None, f"has token id {NUM_TOKENS}, the vocabulary has {NUM_TOKENS} tokens"),
        ({"token_ids": [5, 6], "score": -math.inf}, None, "has score -inf, it must be finite"),
        ({"token_ids": [5, 6], "score": math.nan}, None, "has score nan, it must be finite"),
        ({"token_ids": [5, 6]}, 0, "has 0 log-probabilities, it must have 2"),
        ({"token_ids": [5, 6], "logprobs": [{}]}, 0, "has 1 log-probabilities, it must have 2"),
        ({"token_ids": [5, 6], "logprobs": [{}, {}]}, None, "has 2 log-probabilities, it must have 0"),
    ],
)
@pytest.mark.parametrize("has_ended", [False, True])
def test_values_that_no_beam_has_are_refused(
    beam: dict[str, object], num_logprobs: int | None, words: str, has_ended: bool
) -> None:
    logprobs = [] if num_logprobs is None else [{}, {}]
    beams = [dense_pb2.Beam(token_ids=[5, 6], logprobs=logprobs)] * 2
    message = dense_pb2.BeamProgress()
    if has_ended:
        message.beams.extend(beams)
        message.ended.append(dense_pb2.BeamAnswer(**beam))
    else:
        message.beams.extend([beams[0], dense_pb2.Beam(**beam)])
    with pytest.raises(InvalidRequest, match=words):
        add_beams(search_of_two_beams(num_logprobs=num_logprobs), message, NUM_TOKENS)


@pytest.mark.parametrize(
    ("num_beam_tokens", "num_ended_tokens", "words"),
    [
        (2, 0, "has 0 tokens, it must have from 1 to as many as its beams, which is 2"),
        (2, 3, "has 3 tokens, it must have from 1 to as many as its beams, which is 2"),
        (0, 1, "a search has 1 ended answers, without beams it must have none"),
    ],
)
def test_ended_answers_that_no_search_has_are_refused(num_beam_tokens: int, num_ended_tokens: int, words: str) -> None:
    message = dense_pb2.BeamProgress(
        beams=[dense_pb2.Beam(token_ids=[5] * num_beam_tokens)] * 2 if num_beam_tokens else [],
        ended=[dense_pb2.BeamAnswer(token_ids=[5] * num_ended_tokens)],
    )
    with pytest.raises(InvalidRequest, match=words):
        add_beams(search_of_two_beams(), message, NUM_TOKENS)


def test_a_search_that_goes_on_catches_up_beside_long_prompts_of_other_clients() -> None:
    """Its share of a step, 4 tokens, is less than one for each of its 8 beams."""
    cluster = BeamCluster(num_blocks=1000, max_num_seqs=16, max_num_batched_tokens=16, max_model_len=1000)
    streams = [make_sequence(number, 600, 4) for number in (1, 2, 3)]
    search = make_search(0, 4, 40, 8, early_stopping=EarlyStopping.NEVER, length_penalty=2.0)
    ask(search, stop_token_ids=())
    assert search.spec.beam_search is not None
    found = BeamSearch(search.spec.beam_search, search.spec.max_tokens)
    for _ in range(20):
        found.advance([logprobs_after(search.spec.prompt_token_ids + beam.token_ids) for beam in found.beams])
    state = SearchState(found.beams, [])
    search.policy = BeamPolicy(search.seq_id, search.spec, state)
    search.output_token_ids = list(search.policy.best_token_ids)
    for number, sequence in enumerate((*streams, search)):
        ask(sequence, client=number)
        cluster.scheduler.add(sequence)
    while not cluster.outputs:
        cluster.step()
    assert isinstance(cluster.outputs[0].report, SearchReport), "it chooses its next tokens before a prompt is computed"
    cluster.run_until_idle()
    cluster.check_answers([search])
