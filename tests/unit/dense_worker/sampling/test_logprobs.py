"""Log-probabilities, compared with float64, and which rows get them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.sampling_params import SamplingParams
from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.features.prompt_logprobs.prompt_logprobs_feature import (
    PromptSpan,
    RankedSpans,
    SequencePromptLogprobs,
    find_span,
    rank_prompt_tokens,
)
from services.dense_worker.features.step_part import FurtherRows
from services.dense_worker.runner.batch_rows import RequestState
from services.dense_worker.sampling.logprobs import MAX_ROWS_AT_A_TIME, rank_tokens
from services.dense_worker.sampling.sampler import Sampler
from services.step import PlanEntry
from tests.support.dense.sequences import make_state
from tests.support.examples import examples
from tests.support.reports import prompt_logprobs, read_prompt_logprobs

VOCAB_SIZE = 50
# float32 has 24 bits. A logarithm up to 30 has an error of up to 2e-6, the sum of exponentials a few units more.
TOLERANCE = 1e-5


def exact_logprobs(logits: torch.Tensor) -> np.ndarray:
    wide = logits.double().numpy()
    shifted = wide - wide.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS_AT_A_TIME, 2 * MAX_ROWS_AT_A_TIME + 3])
@pytest.mark.parametrize("num_top", [0, 1, 5, VOCAB_SIZE, VOCAB_SIZE + 7])
def test_ranked_tokens_equal_log_softmax_in_float64(num_rows: int, num_top: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 4.0
    token_ids = torch.randint(VOCAB_SIZE, (num_rows,), generator=generator)
    kept = logits.clone()
    tokens = rank_tokens(logits, token_ids, num_top).read([num_top] * num_rows)
    assert torch.equal(logits, kept)
    expected = exact_logprobs(logits)
    for row, token in enumerate(tokens):
        assert token.logprob == pytest.approx(expected[row, token_ids[row]], abs=TOLERANCE)
        assert token.rank == 1 + np.argsort(-expected[row]).tolist().index(token_ids[row])
        order = np.argsort(-expected[row])[:num_top]
        assert [token_id for token_id, _ in token.top] == order.tolist()
        np.testing.assert_allclose([value for _, value in token.top], expected[row, order], rtol=0, atol=TOLERANCE)


def test_of_tokens_that_tie_each_counts_the_others() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 0.0]] * 4)
    assert [token.rank for token in rank_tokens(logits, torch.arange(4), 0).read([0] * 4)] == [3, 1, 3, 4]


@settings(max_examples=examples(40), deadline=None)
@given(
    wanted=st.lists(st.none() | st.integers(0, 8), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
)
def test_requested_logprobs_are_the_models_own_with_any_options(wanted: list[int | None], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(wanted), VOCAB_SIZE, generator=generator) * 3.0
    params = SamplingParams(
        temperature=2.0,
        top_p=0.8,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        logit_bias=((3, 9.0), (4, -9.0)),
        bad_words=((5,), (6, 7)),
        min_tokens=9,
        allowed_token_ids=tuple(range(2, 20)),
        seed=seed,
    )
    sampler = Sampler(len(wanted) + 1, VOCAB_SIZE, "cpu")
    slots = torch.randperm(len(wanted), generator=generator).tolist()
    for slot, num_logprobs in zip(slots, wanted, strict=True):
        sampler.add(slot, params, [1, 2], [6], [9], num_logprobs)
    count = len(wanted)
    sampled = sampler.sample(logits.clone(), slots, np.full(count, 3), np.full(count, 1))
    asking = {row: num for row, num in enumerate(wanted) if num is not None}
    assert sampled.num_logprobs == asking
    if not asking:
        assert sampled.ranked is None
        return
    assert sampled.ranked is not None
    expected = exact_logprobs(logits)
    for row, token in zip(asking, sampled.ranked.to_host().read(list(asking.values())), strict=True):
        assert token.logprob == pytest.approx(expected[row, sampled.token_ids[row]], abs=TOLERANCE)
        assert [token_id for token_id, _ in token.top] == np.argsort(-expected[row])[: asking[row]].tolist()


def test_logprobs_of_what_is_sampled_are_those_of_the_draws() -> None:
    """Against the distribution as its definition says, and next to a row that asks for the model's own."""
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
    params = SamplingParams(
        temperature=0.5, top_k=6, min_p=0.15, presence_penalty=1.0, logit_bias=((3, 2.0),), sampled_logprobs=True
    )
    greedy = SamplingParams(temperature=0.0, logit_bias=((3, 99.0),), top_p=0.1, sampled_logprobs=True)
    sampler = Sampler(3, VOCAB_SIZE, "cpu")
    for slot, options in enumerate((params, SamplingParams(temperature=0.0), greedy)):
        sampler.add(slot, options, [1], [6], [], 20)
    sampled = sampler.sample(logits.clone(), range(3), np.full(3, 2), np.full(3, 1))
    assert sampled.ranked is not None
    drawn, own, alone = sampled.ranked.to_host().read([20] * 3)

    wide = logits[0].double().numpy().copy()
    wide[3] += 2.0
    wide[6] -= 1.0
    weights = np.exp((wide - wide.max()) / 0.5)
    weights[wide < np.sort(wide)[-6]] = 0.0
    weights[weights < 0.15] = 0.0
    expected = weights / weights.sum()
    assert 1 < np.count_nonzero(expected) < 6
    assert np.exp(drawn.logprob) == pytest.approx(expected[sampled.token_ids[0]], abs=TOLERANCE)
    assert [token_id for token_id, value in drawn.top if value > -np.inf] == np.argsort(-expected)[
        : np.count_nonzero(expected)
    ].tolist()
    np.testing.assert_allclose([np.exp(value) for _, value in drawn.top], np.sort(expected)[::-1][:20], atol=TOLERANCE)
    assert own.logprob == pytest.approx(exact_logprobs(logits)[1].max(), abs=TOLERANCE)
    assert sampled.token_ids[2] == 3 and (alone.logprob, alone.rank) == (0.0, 1)
    assert alone.top[0] == (3, 0.0) and {value for _, value in alone.top[1:]} == {-np.inf}


def test_logprobs_do_not_change_the_tokens() -> None:
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))

    def draw(num_logprobs: int | None) -> list[int]:
        sampler = Sampler(6, VOCAB_SIZE, "cpu")
        for slot in range(6):
            params = SamplingParams(seed=slot, frequency_penalty=0.5, logit_bias=((slot, 2.0),))
            sampler.add(slot, params, [1], [2, 3], [], num_logprobs)
        return sampler.sample(logits.clone(), range(6), np.full(6, 3), np.full(6, 2)).token_ids.tolist()

    assert draw(None) == draw(0) == draw(5)


def prompt_sequence(num_prompt_tokens: int, num_prompt_logprobs: int, seq_id: int = 1) -> RequestState:
    token_ids = tuple((7 * i + 3) % VOCAB_SIZE for i in range(num_prompt_tokens))
    return make_state(seq_id, token_ids, num_prompt_tokens, features=prompt_logprobs(num_prompt_logprobs))


def span_of(sequence: RequestState, start: int, num_tokens: int, first_row: int) -> PromptSpan | None:
    """The span of an entry with these tokens of a sequence."""
    [asked] = sequence.features
    assert isinstance(asked, SequencePromptLogprobs)
    return find_span(PlanEntry(sequence.seq_id, start, num_tokens, num_logits=0), asked, first_row)


def rank(backend: RowBackend, spans: list[PromptSpan], max_num_rows: int) -> RankedSpans:
    further = FurtherRows(backend, torch.empty(0), torch.empty(0), max_num_rows)  # type: ignore[arg-type]
    return rank_prompt_tokens(further, spans)


def read(ranked: RankedSpans) -> list[tuple[int, int, list[TokenLogprobs]]]:
    """Of each span: seq_id, index of the first token, and what is reported of the tokens."""
    found = ranked.to_host().rows()
    return [(span.seq_id, span.start, read_prompt_logprobs(len(rows), rows.tobytes())) for span, rows in found]


class RowBackend:
    """A backend whose logits depend only on the row."""

    def __init__(self, num_rows: int) -> None:
        self.logits = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
        self.asked: list[int] = []

    def last(self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.asked.append(len(rows))
        return self.logits[rows]


@settings(max_examples=examples(60), deadline=None)
@given(
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    num_output_rows=st.integers(0, 4),
    first_row=st.integers(0, 5),
    max_num_rows=st.integers(1, 7),
)
def test_chunks_report_every_prompt_token_except_the_first_once(
    chunks: list[int], num_output_rows: int, first_row: int, max_num_rows: int
) -> None:
    """`num_output_rows`: output tokens that the last chunk computes again, as after a preemption."""
    sequence = prompt_sequence(sum(chunks), 2)
    chunks[-1] += num_output_rows
    reported: list[int] = []
    start = 0
    for num_tokens in chunks:
        if span := span_of(sequence, start, num_tokens, first_row):
            backend = RowBackend(first_row + num_tokens)
            [(_, first, tokens)] = read(rank(backend, [span], max_num_rows))
            assert max(backend.asked) <= max_num_rows
            expected = exact_logprobs(backend.logits)
            for index, token in enumerate(tokens, first):
                row = first_row + index - 1 - start
                assert token.logprob == pytest.approx(expected[row, sequence.token_ids[index]], abs=TOLERANCE)
                assert [token_id for token_id, _ in token.top] == np.argsort(-expected[row])[:2].tolist()
                reported.append(index)
        start += num_tokens
    assert reported == list(range(1, sequence.spec.num_prompt_tokens))


def test_each_prompt_of_a_step_has_its_own_number_of_top_tokens() -> None:
    first, second = prompt_sequence(4, 0, seq_id=1), prompt_sequence(6, 3, seq_id=2)
    spans = [
        span_of(first, 0, 4, 2),
        span_of(second, 2, 3, 6),
    ]
    backend = RowBackend(9)
    found = read(rank(backend, spans, 256))
    assert [(seq_id, start, len(tokens)) for seq_id, start, tokens in found] == [(1, 1, 3), (2, 3, 3)]
    assert [len(token.top) for _, _, tokens in found for token in tokens] == [0, 0, 0, 3, 3, 3]
    expected = exact_logprobs(backend.logits)
    assert found[1][2][2].logprob == pytest.approx(expected[8, second.token_ids[5]], abs=TOLERANCE)


def test_named_tokens_are_reported_behind_the_most_likely_ones_of_their_own_row() -> None:
    """Rows with other tokens, more of them, none, and no log-probabilities at all, in one step."""
    logits = torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 3.0
    expected = exact_logprobs(logits)
    wanted: list[tuple[int | None, tuple[int, ...]]] = [
        (0, (7,)),
        (None, (8, 9)),
        (3, (40, 2, 11)),
        (2, ()),
        (1, (49, 0)),
    ]
    sampler = Sampler(5, VOCAB_SIZE, "cpu")
    for slot, (num_logprobs, named) in enumerate(wanted):
        params = SamplingParams(seed=slot, logit_bias=((7, -90.0),), logprob_token_ids=named)
        sampler.add(slot, params, [1], [], [], num_logprobs)
    for _ in range(2):  # the second time in slots that others have left
        sampled = sampler.sample(logits.clone(), range(5), np.full(5, 1), np.full(5, 0))
        assert sampled.ranked is not None
        values = sampled.ranked.to_host().read(list(sampled.num_logprobs.values()))
        found = dict(zip(sampled.num_logprobs, values, strict=True))
        assert list(found) == [0, 2, 3, 4]
        for row, token in found.items():
            num_top, named = wanted[row]
            assert [each for each, _ in token.top] == [*np.argsort(-expected[row])[:num_top].tolist(), *named]
            np.testing.assert_allclose(
                [value for _, value in token.top], expected[row, [each for each, _ in token.top]], atol=TOLERANCE
            )
        for slot, (num_logprobs, named) in enumerate(wanted):
            sampler.remove(slot)
            sampler.add(slot, SamplingParams(seed=slot, logprob_token_ids=named), [1], [], [], num_logprobs)


def test_prompts_have_named_tokens_and_one_with_the_whole_vocabulary_widens_no_other() -> None:
    named = SamplingParams(logprob_token_ids=(30, 4))
    sequences = [
        make_state(1, prompt_sequence(4, 2).token_ids, 4, named, features=prompt_logprobs(2)),
        prompt_sequence(5, VOCAB_SIZE, seq_id=2),
        prompt_sequence(6, 0, seq_id=3),
    ]
    spans, first_row = [], 0
    for each in sequences:
        count = each.spec.num_prompt_tokens
        spans.append(span_of(each, 0, count, first_row))
        first_row += count
    backend = RowBackend(first_row)
    ranked = rank(backend, spans, max_num_rows=3)
    assert [part.top_logprobs.shape for _, part in ranked.parts] == [(8, 2), (4, VOCAB_SIZE)]
    expected = exact_logprobs(backend.logits)
    found = {seq_id: tokens for seq_id, _, tokens in read(ranked)}
    assert {seq_id: len(tokens) for seq_id, tokens in found.items()} == {1: 3, 2: 4, 3: 5}
    for row, token in enumerate(found[1]):
        assert [each for each, _ in token.top] == [*np.argsort(-expected[row])[:2].tolist(), 30, 4]
        assert token.top[3][1] == pytest.approx(expected[row, 4], abs=TOLERANCE)
    for row, token in enumerate(found[2], 4):
        assert [each for each, _ in token.top] == np.argsort(-expected[row]).tolist()
    assert all(token.top == () for token in found[3])
