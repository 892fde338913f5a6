"""Bad words and biases, compared with a direct implementation of their definitions, also for resumed requests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.sampling_params import (
    MAX_BAD_TOKEN_SEQUENCES,
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIASES,
    SamplingParams,
)
from services.dense_worker.sampling.sampler import Sampler
from tests.support.examples import examples

VOCAB_SIZE = 12  # so small that words of a few tokens occur often
NUM_TOKENS = 40
PROMPT = [1, 2, 3]

WORD = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=4).map(tuple)
WORDS = st.lists(WORD, min_size=1, max_size=9).map(tuple)  # fewer words than tokens, so one token is always allowed


def random_logits(seed: int) -> torch.Tensor:
    """float32 [NUM_TOKENS, VOCAB_SIZE], flat enough that every token is sometimes chosen."""
    return torch.randn(NUM_TOKENS, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def generate(
    params: SamplingParams, logits: torch.Tensor, output: list[int], sampler: Sampler | None = None, slot: int = 0
) -> list[int]:
    """Continues `output` to the end of the logits."""
    sampler = sampler or Sampler(1, VOCAB_SIZE, "cpu")
    sampler.add(slot, params, PROMPT, output, [])
    output = list(output)
    for step in range(len(output), len(logits)):
        position, output_len = np.array([len(PROMPT) + step]), np.array([step])
        output += sampler.sample(logits[step][None].clone(), [slot], position, output_len).token_ids.tolist()
    sampler.remove(slot)
    return output


def allowed_tokens(words: tuple[tuple[int, ...], ...], output: list[int]) -> list[int]:
    """The tokens that complete no bad word, by the definition."""
    return [
        token_id
        for token_id in range(VOCAB_SIZE)
        if not any(tuple([*output, token_id][-len(word) :]) == word for word in words)
    ]


@settings(max_examples=examples(80), deadline=None)
@given(words=WORDS, seed=st.integers(0, 2**31))
def test_greedy_output_is_the_most_likely_without_bad_words(words: tuple[tuple[int, ...], ...], seed: int) -> None:
    logits = random_logits(seed)
    output = generate(SamplingParams(temperature=0.0, bad_words=words), logits, [])
    expected: list[int] = []
    for step in range(NUM_TOKENS):
        expected.append(max(allowed_tokens(words, expected), key=lambda token_id: logits[step, token_id].item()))
    assert output == expected


@settings(max_examples=examples(40), deadline=None)
@given(words=WORDS, seed=st.integers(0, 2**31), num_before=st.integers(0, NUM_TOKENS))
def test_sampled_output_is_the_same_when_resumed_and_has_no_bad_word(
    words: tuple[tuple[int, ...], ...], seed: int, num_before: int
) -> None:
    bias = tuple((token_id, 0.3 * token_id) for token_id in range(0, VOCAB_SIZE, 2))
    params = SamplingParams(bad_words=words, logit_bias=bias, frequency_penalty=0.3, seed=seed)
    logits = random_logits(seed)
    whole = generate(params, logits, [])
    for end in range(NUM_TOKENS):
        assert whole[end] in allowed_tokens(words, whole[:end])
    # Resumed in another slot of a used sampler, as after a preemption.
    sampler = Sampler(3, VOCAB_SIZE, "cpu")
    generate(SamplingParams(bad_words=((3, 4, 5, 6, 7), (8,)), logit_bias=((1, 50.0),)), logits, [], sampler, slot=2)
    assert generate(params, logits, whole[:num_before], sampler, slot=2) == whole


def test_a_bad_word_that_begins_in_the_prompt_is_allowed() -> None:
    params = SamplingParams(temperature=0.0, bad_words=((PROMPT[-1], 7),))
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, 7], logits[1, 9] = 1.0, 1.0
    assert generate(params, logits, []) == [7, 9]


def test_only_the_last_token_of_the_longest_word_is_forbidden() -> None:
    word = tuple(i % 5 for i in range(MAX_BAD_WORD_TOKENS))
    logits = torch.nn.functional.one_hot(torch.tensor(word), VOCAB_SIZE).float()
    logits[:, 11] += 0.5  # the second most likely token
    output = generate(SamplingParams(temperature=0.0, bad_words=(word,)), logits, [])
    assert output == [*word[:-1], 11]


def test_growing_tables_do_not_change_other_sequences() -> None:
    sampler = Sampler(3, VOCAB_SIZE, "cpu")
    logits = torch.arange(float(VOCAB_SIZE)).repeat(3, 1)

    def step(slots: list[int]) -> list[int]:
        count = len(slots)
        return sampler.sample(logits[:count].clone(), slots, np.full(count, 5), np.full(count, 2)).token_ids.tolist()

    sampler.add(0, SamplingParams(temperature=0.0, bad_words=((11,),), logit_bias=((9, 5.0),)), PROMPT, [], [])
    assert step([0]) == [9]
    words = tuple((token_id % 8, *range(6), 10) for token_id in range(MAX_BAD_TOKEN_SEQUENCES))
    biases = tuple((token_id, -1.0) for token_id in range(10))
    sampler.add(2, SamplingParams(temperature=0.0, bad_words=words, logit_bias=biases), PROMPT, list(range(6)), [])
    sampler.add(1, SamplingParams(temperature=0.0), PROMPT, [], [])
    assert step([2, 1, 0]) == [11, 11, 9]
    assert step([0]) == [9]


def test_the_maximum_number_of_biases_is_added() -> None:
    vocab_size = MAX_LOGIT_BIASES + 10
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0))
    bias = tuple((token_id, (token_id % 7) / 4.0) for token_id in range(10, vocab_size))
    expected = logits.clone()
    for token_id, value in bias:
        expected[0, token_id] += value
    sampler = Sampler(1, vocab_size, "cpu")
    sampler.add(0, SamplingParams(temperature=0.0, logit_bias=bias), PROMPT, [], [])
    sampler.sample(logits, [0], np.array([3]), np.array([0]))
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("bias", [-100.0, 100.0])
def test_strongest_bias_bans_or_forces_a_token(bias: float) -> None:
    logits = random_logits(3) * 5.0
    output = generate(SamplingParams(logit_bias=((4, bias),), seed=5), logits, [])
    assert set(output) == {4} if bias > 0 else 4 not in output
