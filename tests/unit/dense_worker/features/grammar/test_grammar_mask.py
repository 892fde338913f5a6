"""The mask of a form on logits: what it leaves, what wins where options contradict each other, and whom it concerns."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.common.sampling_params import SamplingParams
from services.common.structured_output import Constraint, StructuredOutput
from services.dense_worker.features.grammar.grammar_mask import FLOOR, GrammarMask, apply_masks
from services.dense_worker.sampling.editors import EDITORS
from services.dense_worker.sampling.sampler import Sampler
from tests.support.dense.forms import EOS, Forms, make_vocabulary
from tests.support.dense.sequences import with_grammar

VOCAB_SIZE = 290  # fewer than the tokenizer has
DIGITS = StructuredOutput(Constraint.REGEX, "[0-9]+")


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(make_vocabulary(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000])
def test_a_token_keeps_its_logit_exactly_if_its_bit_is_set(vocab_size: int, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(vocab_size)
    masks = generator.integers(-(2**31), 2**31, (3, -(-vocab_size // 32) + 1), dtype=np.int64).astype(np.int32)
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[1, ::3] = -torch.inf
    expected = logits.clone()
    rows = [0, 1, 4]
    for mask, row in zip(masks.view(np.uint32), rows, strict=True):
        for token in range(vocab_size):
            is_set = int(mask[token // 32]) >> (token % 32) & 1
            expected[row, token] = max(float(expected[row, token]), FLOOR) if is_set else -torch.inf
    apply_masks(logits, torch.tensor(rows), torch.from_numpy(masks), FLOOR)
    assert torch.equal(logits, expected)


def sample_first(
    forms: Forms,
    params: list[SamplingParams],
    with_form: list[bool],
    stop: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> list[int]:
    """The first token of each row, all in one step, from logits of this type."""
    sampler = Sampler(len(params), VOCAB_SIZE, "cpu", (*EDITORS, GrammarMask), dtype)
    for slot, each in enumerate(params):
        if with_form[slot]:
            grammar = with_grammar(forms.matcher(DIGITS))
            sampler.add(slot, replace(each, structured_output=DIGITS), [1], [], stop, None, [grammar])
        else:
            sampler.add(slot, each, [1], [], stop)
    logits = (torch.randn(len(params), VOCAB_SIZE, generator=torch.Generator().manual_seed(2)) * 4).to(dtype)
    zeros = np.zeros(len(params), dtype=np.int64)
    return sampler.sample(logits, np.arange(len(params)), zeros + 1, zeros).token_ids.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_without_a_form_get_the_same_tokens_beside_rows_with_one(forms: Forms, dtype: torch.dtype) -> None:
    params = [SamplingParams(seed=i, temperature=1.0 * (i % 3)) for i in range(12)]
    plain = sample_first(forms, params, [False] * 12, dtype=dtype)
    mixed = sample_first(forms, params, [i % 2 == 0 for i in range(12)], dtype=dtype)
    digits = {*forms.tokens("0123456789"), *forms.tokenizer.tokenize_str("12")}
    assert mixed[1::2] == plain[1::2]
    assert set(mixed[::2]) <= digits and not set(plain[::2]) <= digits


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_other_options_choose_among_the_tokens_of_the_form(forms: Forms, temperature: float) -> None:
    three, four, letter = forms.tokens("34a")
    all_but_four = tuple((each,) for each in (*forms.tokens("012356789"), *forms.tokenizer.tokenize_str("12")))
    options = {"temperature": temperature, "seed": 5}
    params = [
        SamplingParams(bad_words=all_but_four, **options),
        SamplingParams(allowed_token_ids=(letter, three), **options),
        SamplingParams(allowed_token_ids=(letter, four), logit_bias=((letter, 100.0),), **options),
    ]
    assert sample_first(forms, params, [True] * 3) == [four, three, four]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_the_form_wins_where_other_options_leave_none_of_its_tokens(
    forms: Forms, temperature: float, dtype: torch.dtype
) -> None:
    options = {"temperature": temperature, "seed": 5}
    digits = [*forms.tokens("0123456789"), *forms.tokenizer.tokenize_str("12")]
    params = [
        SamplingParams(bad_words=tuple((each,) for each in digits), **options),
        SamplingParams(allowed_token_ids=tuple(forms.tokens("ab")), **options),
        SamplingParams(min_tokens=3, top_k=1, **options),
    ]
    found = sample_first(forms, params, [True] * 3, stop=(EOS, *digits), dtype=dtype)
    assert set(found) <= set(digits)


def test_a_sequence_that_has_ended_leaves_no_grammar_behind(forms: Forms) -> None:
    """Neither in a slot that stays free, nor in one that a sequence without a form gets."""
    sampler = Sampler(2, VOCAB_SIZE, "cpu", (*EDITORS, GrammarMask))
    left = []
    for slot in range(2):
        grammar = with_grammar(forms.matcher(DIGITS))
        sampler.add(slot, SamplingParams(structured_output=DIGITS), [1], [], [], None, [grammar])
        left.append(weakref.ref(grammar.matcher))
        del grammar
    sampler.remove(0)
    assert left[0]() is None and left[1]() is not None
    sampler.add(0, SamplingParams(logit_bias=((3, 1.0),)), [1], [], [])
    sampler.remove(0)
    sampler.remove(1)
    sampler.add(1, SamplingParams(), [1], [], [])
    assert left[1]() is None
