"""The sampler, compared with the logits processors of transformers, with formulas, and between different batches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.common.sampling_params import SamplingParams
from services.dense_worker.sampling.philox import token_words
from services.dense_worker.sampling.sampler import Sampler
from services.dense_worker.sampling.token_filters import WEIGHT_ONE, keep_min_p, keep_top
from tests.support.examples import examples

VOCAB_SIZE = 97
NO_TOKENS = torch.zeros((1, 0), dtype=torch.int64)
MARGIN = 1e-5  # if float64 values are closer than this, float32 may order them differently

torch.set_num_threads(1)


@dataclasses.dataclass
class Request:
    """A sequence about to sample its next token."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    stop: list[int]
    logits: torch.Tensor  # float32 [VOCAB_SIZE]


def sample_batch(requests: list[Request], slots: list[int], sampler: Sampler | None = None) -> torch.Tensor:
    sampler = sampler or Sampler(max(slots) + 1, VOCAB_SIZE, "cpu")
    for slot, request in zip(slots, requests, strict=True):
        sampler.add(slot, request.params, request.prompt, request.output, request.stop)
    return sampler.sample(
        torch.stack([request.logits for request in requests]),
        slots,
        np.array([len(request.prompt) + len(request.output) for request in requests]),
        np.array([len(request.output) for request in requests]),
    ).token_ids


def random_bias(rng: np.random.Generator) -> tuple[tuple[int, float], ...]:
    token_ids = rng.choice(VOCAB_SIZE, rng.integers(1, 12), replace=False)
    return tuple((int(token_id), float(rng.normal(0.0, 5.0))) for token_id in token_ids)


def random_bad_words(rng: np.random.Generator, output: list[int]) -> tuple[tuple[int, ...], ...]:
    """Words of 1 to 6 tokens. About half of the long ones begin with the end of the output, so that they apply."""
    words = []
    for _ in range(rng.integers(1, 10)):
        num_before = int(rng.integers(0, 6))
        before = rng.integers(0, VOCAB_SIZE, num_before).tolist()
        if rng.random() < 0.5:
            before = output[len(output) - min(num_before, len(output)) :]
        words.append((*before, int(rng.integers(0, VOCAB_SIZE))))
    return tuple(words)


def random_allowed_tokens(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(sorted(rng.choice(VOCAB_SIZE, rng.integers(1, 20), replace=False).tolist()))


def random_request(rng: np.random.Generator) -> Request:
    """A request in which every option is set or not at random."""

    def maybe(value: float, neutral: float) -> float:
        return value if rng.random() < 0.4 else neutral

    output = rng.integers(0, VOCAB_SIZE, rng.integers(0, 20)).tolist()
    params = SamplingParams(
        temperature=maybe(0.0, float(rng.uniform(0.2, 3.0))),
        logit_bias=random_bias(rng) if rng.random() < 0.4 else (),
        bad_words=random_bad_words(rng, output) if rng.random() < 0.4 else (),
        top_k=int(rng.integers(1, VOCAB_SIZE + 20)) if rng.random() < 0.4 else None,
        top_p=maybe(float(rng.uniform(0.05, 1.0)), 1.0),
        min_p=maybe(float(rng.uniform(0.0, 0.5)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2.0)), 1.0),
        presence_penalty=maybe(float(rng.uniform(-2.0, 2.0)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2.0, 2.0)), 0.0),
        min_tokens=int(maybe(10, 0)),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        allowed_token_ids=random_allowed_tokens(rng) if rng.random() < 0.3 else (),
    )
    return Request(
        params=params,
        prompt=rng.integers(0, VOCAB_SIZE, rng.integers(1, 20)).tolist(),
        output=output,
        stop=rng.choice(VOCAB_SIZE, rng.integers(0, 5), replace=False).tolist(),
        logits=torch.from_numpy(rng.normal(0.0, 3.0, VOCAB_SIZE)).float(),
    )


def edit_by_hugging_face(request: Request) -> torch.Tensor:
    """Edited logits, float64 [1, VOCAB_SIZE]. Transformers lacks presence and frequency penalties: OpenAI's formula."""
    params, scores = request.params, request.logits.double()[None]
    ids = torch.tensor([request.prompt + request.output])
    if params.logit_bias:
        bias = [[[token_id], value] for token_id, value in params.logit_bias]
        scores = SequenceBiasLogitsProcessor(bias)(ids, scores)
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token_id in set(request.output):
        scores[0, token_id] -= params.presence_penalty
        scores[0, token_id] -= params.frequency_penalty * request.output.count(token_id)
    if params.bad_words:
        # transformers also searches the prompt for words, so it gets a prompt in which none can begin.
        output = torch.tensor([[VOCAB_SIZE] * len(request.prompt) + request.output])
        scores = NoBadWordsLogitsProcessor([list(word) for word in params.bad_words])(output, scores)
    if request.stop:
        minimum = MinNewTokensLengthLogitsProcessor(len(request.prompt), params.min_tokens, request.stop)
        scores = minimum(ids, scores)
    if params.allowed_token_ids:
        allowed = list(params.allowed_token_ids)
        if scores[0, allowed].max() == -torch.inf:
            scores[0, allowed] = 0.0  # all of them become equally likely
        scores = PrefixConstrainedLogitsProcessor(lambda batch, tokens: allowed, 1)(ids, scores)
    return scores


def filter_by_hugging_face(params: SamplingParams, scores: torch.Tensor) -> torch.Tensor:
    """The probabilities after the filters, float64 [VOCAB_SIZE]."""
    scores = TemperatureLogitsWarper(params.temperature)(NO_TOKENS, scores)
    if params.top_k is not None:
        scores = TopKLogitsWarper(params.top_k)(NO_TOKENS, scores)
    scores = TopPLogitsWarper(params.top_p)(NO_TOKENS, scores)
    scores = MinPLogitsWarper(params.min_p)(NO_TOKENS, scores)
    return scores.softmax(-1)[0]


def reject_close_borders(params: SamplingParams, scores: torch.Tensor) -> None:
    """Rejects examples in which a token is too close to the limit of top-p or min-p to decide whether it is kept."""
    without_top_p = dataclasses.replace(params, top_p=1.0, min_p=0.0)
    cumulative = filter_by_hugging_face(without_top_p, scores).sort().values.cumsum(-1)
    assume(params.top_p == 1.0 or not ((cumulative - (1.0 - params.top_p)).abs() < MARGIN).any())
    probabilities = filter_by_hugging_face(dataclasses.replace(params, min_p=0.0), scores)
    relative = probabilities / probabilities.max()
    relative = relative[(relative > 0.0) & (relative < 1.0)]  # those equal to the highest are always kept
    assume(params.min_p == 0.0 or not ((relative - params.min_p).abs() < MARGIN).any())


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 12))
def test_mixed_batch_samples_from_hugging_face_distributions(seed: int, num_rows: int) -> None:
    rng = np.random.default_rng(seed)
    requests = [random_request(rng) for _ in range(num_rows)]
    sampled = sample_batch(requests, rng.permutation(num_rows).tolist()).tolist()
    for request, token_id in zip(requests, sampled, strict=True):
        scores = edit_by_hugging_face(request)
        if request.params.is_greedy:
            assert token_id == scores.argmax().item()
            continue
        reject_close_borders(request.params, scores)
        logprobs = filter_by_hugging_face(request.params, scores).log()
        noisy = logprobs + gumbel_noise(request.params.seed, len(request.prompt) + len(request.output))
        best = noisy.topk(2).values
        if best[0] - best[1] > MARGIN:
            assert token_id == noisy.argmax().item()


def gumbel_noise(seed: int, position: int) -> torch.Tensor:
    """The noise of each token by its formula, float64 [VOCAB_SIZE]."""
    words = token_words(np.array([seed], np.uint64), np.array([position], np.uint64), VOCAB_SIZE)[0]
    uniforms = (torch.from_numpy(words.astype(np.float64)) + 0.5) / 2**32
    return -(-uniforms.log()).log()


@settings(max_examples=examples(200), deadline=None)
@given(
    quarters=st.lists(st.integers(-20, 20), min_size=1, max_size=40),  # few values, so that many logits are equal
    temperature=st.floats(0.1, 5.0),
    top_k=st.none() | st.integers(1, 50),
    top_p=st.just(1.0) | st.floats(0.01, 1.0),
    min_p=st.just(0.0) | st.floats(0.0, 1.0),
)
def test_filters_keep_the_tokens_that_hugging_face_keeps(
    quarters: list[int], temperature: float, top_k: int | None, top_p: float, min_p: float
) -> None:
    logits = torch.tensor([quarters]) / 4.0
    num_tokens = len(quarters)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    reject_close_borders(params, logits.double())
    expected = filter_by_hugging_face(params, logits.double())

    max_top_k = min(top_k or num_tokens, num_tokens)
    temperatures = torch.tensor([[temperature]])
    top_ks, top_ps = torch.tensor([[max_top_k]]), torch.tensor([[top_p]], dtype=torch.float64)
    filtered = keep_top(logits, temperatures, top_ks, top_ps, max_top_k, has_top_p=top_p < 1.0)
    filtered = keep_min_p(filtered, temperatures, torch.tensor([[min_p]], dtype=torch.float64))
    assert torch.equal(filtered[filtered > -torch.inf], logits[filtered > -torch.inf])
    probabilities = (filtered[0].double() / temperature).softmax(-1)
    # Which of several equally likely tokens top-p keeps depends on the sort in transformers, so the ids may differ.
    is_expected = expected >= (expected.max() / WEIGHT_ONE if top_p < 1.0 else torch.finfo(expected.dtype).tiny)
    assert torch.equal(filtered[0][filtered[0] > -torch.inf].sort().values, logits[0][is_expected].sort().values)
    torch.testing.assert_close(probabilities.sort().values, expected.sort().values, rtol=0, atol=1e-6)


def test_top_p_keeps_the_lowest_ids_of_tied_tokens() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]])
    limit = (np.e + 1.5) / (np.e + 4)  # the most likely token, one of the four equal ones, and half of another
    top_k, top_p = torch.tensor([[5]]), torch.tensor([[limit]], dtype=torch.float64)
    kept = keep_top(logits, torch.ones(1, 1), top_k, top_p, 5, has_top_p=True)
    assert (kept[0] > -torch.inf).tolist() == [True, True, True, False, False]


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 16))
def test_token_is_the_same_alone_and_in_any_batch_and_slot(seed: int, num_rows: int) -> None:
    rng = np.random.default_rng(seed)
    requests = [random_request(rng) for _ in range(num_rows)]
    together = sample_batch(requests, rng.permutation(num_rows + 3)[:num_rows].tolist()).tolist()
    assert together == [sample_batch([request], [int(rng.integers(5))]).item() for request in requests]


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 16), st.sampled_from([torch.bfloat16, torch.float16]))
def test_tokens_of_logits_in_the_models_dtype_are_those_in_float32(
    seed: int, num_rows: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(seed)
    requests = [random_request(rng) for _ in range(num_rows)]
    requests = [dataclasses.replace(each, logits=each.logits.to(dtype)) for each in requests]
    in_float = [dataclasses.replace(each, logits=each.logits.float()) for each in requests]
    expected = sample_batch(in_float, list(range(num_rows)))
    sampler = Sampler(num_rows, VOCAB_SIZE, "cpu", logits_dtype=dtype)
    assert torch.equal(sample_batch(requests, list(range(num_rows)), sampler), expected)


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_edited_logits_equal_those_of_hugging_face(seed: int) -> None:
    request = random_request(np.random.default_rng(seed))
    sampler = Sampler(1, VOCAB_SIZE, "cpu")
    sampler.add(0, request.params, request.prompt, request.output, request.stop)
    logits = request.logits[None].clone()
    sampler.sample(logits, [0], np.array([40]), np.array([len(request.output)]))
    torch.testing.assert_close(logits.double(), edit_by_hugging_face(request), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 6, "top_p": 0.95, "min_p": 0.05}], ids=str
)
def test_frequencies_follow_the_filtered_distribution(options: dict[str, float]) -> None:
    num_slots, num_steps = 500, 40
    logits = torch.tensor([0.5, -1.0, 2.0, 1.0, 0.0, -0.5, -2.0, -3.0])
    sampler = Sampler(num_slots, len(logits), "cpu")
    for slot in range(num_slots):
        sampler.add(slot, SamplingParams(temperature=1.5, seed=slot, **options), [0], [], [])
    counts = torch.zeros(len(logits))
    for position in range(1, num_steps + 1):
        batch = logits.repeat(num_slots, 1)
        sampled = sampler.sample(
            batch, np.arange(num_slots), np.full(num_slots, position), np.zeros(num_slots)
        )
        counts += sampled.token_ids.bincount(minlength=len(logits))
    probabilities = filter_by_hugging_face(SamplingParams(temperature=1.5, **options), logits.double()[None])
    expected = probabilities * num_slots * num_steps
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi_square < 29.9  # at most 7 degrees of freedom: above with probability 1e-4


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_filter_that_keeps_the_token_does_not_change_it(seed: int) -> None:
    """The noise depends on the token id, not on the index among the kept tokens."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=float(rng.uniform(0.5, 2.0)), seed=seed)
    request = Request(params, [0], [], [], torch.from_numpy(rng.normal(0.0, 2.0, VOCAB_SIZE)).float())
    token_id = sample_batch([request], [0]).item()
    rank = int((request.logits > request.logits[token_id]).sum()) + 1
    mass = float((request.logits / params.temperature).softmax(-1).sort(descending=True).values[:rank].sum())
    for options in ({"top_k": rank}, {"top_k": rank + 5}, {"top_p": min(mass + 1e-4, 1.0)}, {"min_p": 1e-9}):
        filtered = dataclasses.replace(request, params=dataclasses.replace(params, **options))
        assert sample_batch([filtered], [0]).item() == token_id


def test_same_seed_repeats_and_other_seeds_and_positions_differ() -> None:
    def draw_tokens(seed: int) -> list[int]:
        sampler = Sampler(1, 1000, "cpu")
        sampler.add(0, SamplingParams(seed=seed), [0], [], [])
        return [
            sampler.sample(torch.zeros(1, 1000), [0], np.array([position]), np.array([0])).token_ids.item()
            for position in range(20)
        ]

    assert draw_tokens(5) == draw_tokens(5)
    assert len(set(draw_tokens(5))) > 10
    for other in (6, 5 + 2**32, 2**64 - 1):
        assert draw_tokens(5) != draw_tokens(other)


@pytest.mark.parametrize("num_before", [0, 1, 7, 25])
def test_resumed_request_samples_the_same_tokens(num_before: int) -> None:
    params = SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.7, top_k=30, min_tokens=20, seed=3
    )
    prompt, stop = [3, 1, 4, 1, 5], [10, 11, 12]
    step_logits = torch.randn(30, 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 2.0

    def generate(output: list[int]) -> list[int]:
        sampler = Sampler(2, VOCAB_SIZE, "cpu")
        sampler.add(1, params, prompt, output, stop)
        for step in range(len(output), len(step_logits)):
            position = np.array([len(prompt) + step])
            token_id = sampler.sample(step_logits[step].clone(), [1], position, np.array([step])).token_ids.item()
            output = [*output, token_id]
        return output

    whole = generate([])
    assert len(set(whole)) > 10
    assert generate(whole[:num_before]) == whole


def test_stop_tokens_are_sampled_only_after_min_tokens() -> None:
    sampler = Sampler(2, 6, "cpu")
    sampler.add(0, SamplingParams(temperature=0.0, min_tokens=2), [0], [], [5, 4, 3, 999])
    sampler.add(1, SamplingParams(temperature=0.0), [0], [], [5])
    logits = torch.arange(6.0).repeat(2, 1)
    sampled = [
        sampler.sample(logits.clone(), [0, 1], np.full(2, step + 1), np.full(2, step)).token_ids.tolist()
        for step in range(4)
    ]
    assert sampled == [[2, 5], [2, 5], [5, 5], [5, 5]]


def test_next_step_finds_the_token_in_its_slot() -> None:
    sampler = Sampler(4, 8, "cpu")
    for slot in range(4):
        sampler.add(slot, SamplingParams(temperature=0.0), [1, 2], [7] if slot == 3 else [], [])
    sampler.sample(torch.eye(8)[[3, 4, 5, 7]], [0, 1, 2, 3], np.full(4, 2), np.zeros(4, np.int64))
    sampler.sample(torch.eye(8)[[4, 6]], [2, 0], np.array([3, 3]), np.array([1, 1]))
    assert sampler.last_token.tolist() == [6, 4, 4, 7, 0]


def test_reused_slot_has_nothing_of_the_previous_sequence() -> None:
    request = random_request(np.random.default_rng(1))
    heavy = SamplingParams(repetition_penalty=2.0, frequency_penalty=2.0, min_tokens=50, seed=1)
    light = dataclasses.replace(heavy, frequency_penalty=0.1)
    sampler = Sampler(1, VOCAB_SIZE, "cpu")
    sampler.add(0, heavy, list(range(50)), [5, 6, 5], [7, 8, 9])
    sampler.sample(request.logits[None].clone(), [0], np.array([53]), np.array([3]))
    sampler.remove(0)
    sampler.add(0, light, [1], [2], [3])
    logits = request.logits[None].clone()
    sampler.sample(logits, [0], np.array([2]), np.array([1]))
    afresh = Request(light, [1], [2], [3], request.logits)
    torch.testing.assert_close(logits.double(), edit_by_hugging_face(afresh), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e37])
@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 100.0])
def test_extreme_logits_and_temperatures_give_tokens_of_nonzero_probability(
    scale: float, temperature: float
) -> None:
    logits = torch.linspace(-1.0, 1.0, 50)[None] * scale
    logits[0, 7] = -torch.inf
    sampler = Sampler(1, 50, "cpu")
    sampler.add(0, SamplingParams(temperature=temperature, top_p=0.9, min_p=0.01, seed=1), [0], [], [])
    for position in range(20):
        token_id = sampler.sample(logits.clone(), [0], np.array([position]), np.array([0])).token_ids.item()
        assert token_id != 7
        assert token_id == 49 or (logits[0, 49] - logits[0, token_id]) / temperature < 5.0


def test_nan_logits_do_not_change_other_rows() -> None:
    rng = np.random.default_rng(2)
    requests = [random_request(rng) for _ in range(6)]
    expected = sample_batch(requests, list(range(6))).tolist()
    for broken in (0, 3, 5):
        damaged = list(requests)
        damaged[broken] = dataclasses.replace(
            requests[broken],
            params=SamplingParams(top_p=0.5, min_p=0.1, top_k=3 if broken else None),
            logits=torch.full((VOCAB_SIZE,), torch.nan),
        )
        sampled = sample_batch(damaged, list(range(6))).tolist()
        assert 0 <= sampled[broken] < VOCAB_SIZE
        assert sampled[:broken] == expected[:broken]
        assert sampled[broken + 1 :] == expected[broken + 1 :]


def test_if_bad_words_forbid_all_allowed_tokens_one_of_them_is_chosen() -> None:
    words = ((1, 7), (1, 8))
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(2))

    def choose(output: list[int], **options: float) -> int:
        params = SamplingParams(bad_words=words, allowed_token_ids=(7, 8), **options)
        return int(sample_batch([Request(params, [5], output, [], logits.clone())], [0]).item())

    assert choose([1], temperature=0.0) == 7, "the first one of equal tokens"
    assert choose([2], temperature=0.0) == max((7, 8), key=lambda token_id: logits[token_id])
    drawn = [choose([1], seed=seed) for seed in range(200)]
    assert set(drawn) == {7, 8}
    assert 70 <= drawn.count(7) <= 130, "both are equally likely, within four standard deviations"


def test_the_memory_of_slots_may_be_reused_after_a_step() -> None:
    sampler, slots, lens = Sampler(4, VOCAB_SIZE, "cpu"), np.array([0, 1]), np.array([1, 1])
    for slot in range(4):
        sampler.add(slot, SamplingParams(temperature=0.0), [0], [], [])
    sampler.sample(torch.eye(VOCAB_SIZE)[[3, 4]], slots, lens, lens)
    slots[:] = [2, 3]
    sampler.sample(torch.eye(VOCAB_SIZE)[[5, 6]], np.array([0, 1]), lens, lens)
    assert sampler.last_token.tolist() == [5, 6, 0, 0, 0]
