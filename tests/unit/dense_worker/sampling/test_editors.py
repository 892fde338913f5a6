"""The list of editors: their order over several steps, calls only for rows that need them, and a new editor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.sampling_params import SamplingParams
from services.dense_worker.sampling.editors import EDITORS
from services.dense_worker.sampling.logits_editor import EditedRows, EditedSequence, LogitsEditor
from services.dense_worker.sampling.sampler import Sampler
from tests.support.examples import examples

VOCAB_SIZE = 11
STOP = [3, 5, VOCAB_SIZE + 7]  # the last one is beyond the vocabulary
CPU = torch.device("cpu")

TOKEN_ID = st.integers(0, VOCAB_SIZE - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.8, -0.3]),
    min_tokens=st.integers(0, 4),
    logit_bias=st.dictionaries(TOKEN_ID, st.floats(-9.0, 9.0), max_size=3).map(lambda bias: tuple(bias.items())),
    bad_words=st.lists(st.lists(TOKEN_ID, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    allowed_token_ids=st.lists(TOKEN_ID, max_size=6, unique=True).map(tuple),
)


def edit_by_definition(
    params: SamplingParams, prompt: list[int], output: list[int], logits: list[float]
) -> list[float]:
    """The logits after all options, token by token, in the order stated by `SamplingParams`."""
    bias, edited = dict(params.logit_bias), []
    for token_id, logit in enumerate(logits):
        logit += bias.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            logit *= params.repetition_penalty if logit < 0 else 1.0 / params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token_id)
        logit -= params.presence_penalty * (token_id in output)
        if any(tuple([*output, token_id][-len(word) :]) == word for word in params.bad_words):
            logit = -np.inf
        if token_id in STOP and len(output) < params.min_tokens:
            logit = -np.inf
        edited.append(logit)
    if allowed := params.allowed_token_ids:
        is_any_left = any(edited[token_id] > -np.inf for token_id in allowed)
        for token_id in range(VOCAB_SIZE):
            if token_id not in allowed:
                edited[token_id] = -np.inf
            elif not is_any_left:
                edited[token_id] = 0.0
    return edited


@settings(max_examples=examples(80), deadline=None)
@given(
    batch=st.lists(st.tuples(PARAMS, st.lists(TOKEN_ID, min_size=1, max_size=4)), min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
)
def test_editors_compose_in_order_over_the_steps_of_a_mixed_batch(
    batch: list[tuple[SamplingParams, list[int]]], seed: int
) -> None:
    sampler = Sampler(len(batch), VOCAB_SIZE, "cpu")
    for slot, (params, prompt) in enumerate(batch):
        sampler.add(slot, params, prompt, [], STOP)
    generator = torch.Generator().manual_seed(seed)
    outputs: list[list[int]] = [[] for _ in batch]
    for step in range(6):
        logits = torch.randn(len(batch), VOCAB_SIZE, generator=generator) * 3.0
        expected = [
            edit_by_definition(params, prompt, output, row)
            for (params, prompt), output, row in zip(batch, outputs, logits.tolist(), strict=True)
        ]
        slots = torch.randperm(len(batch), generator=generator).tolist()  # a different order of rows in every step
        edited = logits[slots]
        sampled = sampler.sample(edited, slots, np.full(len(batch), 9), np.full(len(batch), step)).token_ids.tolist()
        torch.testing.assert_close(edited, torch.tensor(expected)[slots], rtol=1e-5, atol=1e-5)
        for slot, token_id in zip(slots, sampled, strict=True):
            outputs[slot].append(token_id)


class Countdown(LogitsEditor):
    """An additional editor. It forces the newest token minus 1, only for even seeds."""

    options = ("temperature",)
    made: Countdown

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.newest = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.calls: list[tuple[str, list[int], list[int]]] = []
        Countdown.made = self

    def set(self, slot: int, sequence: EditedSequence) -> bool:
        self.newest[slot] = [*sequence.prompt_token_ids, *sequence.output_token_ids][-1]
        return sequence.params.seed % 2 == 0

    def apply(self, logits: torch.Tensor, rows: EditedRows) -> None:
        self.calls.append(("apply", rows.rows.tolist(), rows.slots.tolist()))
        device_rows, slots = rows.on_device
        logits[device_rows] = -torch.inf
        logits[device_rows, self.newest[slots] - 1] = 0.0

    def append(self, rows: EditedRows, token_ids: torch.Tensor) -> None:
        self.calls.append(("append", rows.rows.tolist(), rows.slots.tolist()))
        device_rows, slots = rows.on_device
        self.newest[slots] = token_ids[device_rows]


def sample_greedily(sampler: Sampler, slots: list[int], output_len: int) -> list[int]:
    """Samples greedily from logits that increase with the token id."""
    logits = torch.arange(float(VOCAB_SIZE)).repeat(len(slots), 1)
    return sampler.sample(
        logits, slots, np.full(len(slots), 3), np.full(len(slots), output_len)
    ).token_ids.tolist()


def test_an_additional_editor_only_needs_to_be_in_the_list() -> None:
    sampler = Sampler(4, VOCAB_SIZE, "cpu", [*EDITORS, Countdown])
    penalized = SamplingParams(temperature=0.0, frequency_penalty=0.75, seed=1)
    sampler.add(3, SamplingParams(temperature=0.0, seed=0), [1, 8], [], [])
    sampler.add(0, penalized, [4], [], [])
    sampler.add(1, SamplingParams(temperature=0.7, seed=2, logit_bias=((9, 50.0),)), [2], [6], [])
    steps = [sample_greedily(sampler, [0, 1, 3], step) for step in range(3)]
    assert steps == [[10, 5, 7], [10, 4, 6], [9, 3, 5]], "the penalty works after two tokens, the last editor wins"
    assert Countdown.made.calls == [("apply", [1, 2], [1, 3]), ("append", [1, 2], [1, 3])] * 3


def test_editor_is_called_only_while_a_row_of_the_step_needs_it() -> None:
    sampler = Sampler(2, VOCAB_SIZE, "cpu", [Countdown])
    needy, other = SamplingParams(temperature=0.0, seed=0), SamplingParams(temperature=0.0, seed=1)
    sampler.add(0, needy, [8], [], [])
    sampler.add(1, other, [8], [], [])
    assert sample_greedily(sampler, [1], 0) == [10]
    assert Countdown.made.calls == []
    assert sample_greedily(sampler, [1, 0], 0) == [10, 7]
    sampler.remove(0)
    sampler.add(0, other, [8], [], [])
    Countdown.made.calls.clear()
    assert sample_greedily(sampler, [1, 0], 1) == [10, 10]
    assert Countdown.made.calls == []


class Asked(LogitsEditor):
    """Raises an error when it is asked about a sequence."""

    options = ("min_p", "bad_words")

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None: ...

    def set(self, slot: int, sequence: EditedSequence) -> bool:
        raise LookupError(slot)


def test_an_editor_is_asked_only_about_sequences_that_change_its_options() -> None:
    sampler = Sampler(4, VOCAB_SIZE, "cpu", [Asked])
    sampler.add(0, SamplingParams(), [1], [], STOP)
    sampler.add(1, SamplingParams(temperature=0.0, seed=3, min_tokens=2, min_p=0.0, bad_words=()), [1], [], STOP)
    for params in (SamplingParams(min_p=0.1), SamplingParams(bad_words=((1, 2),))):
        with pytest.raises(LookupError):
            Sampler(4, VOCAB_SIZE, "cpu", [Asked]).add(2, params, [1], [], STOP)


def test_each_row_of_a_sequence_is_edited_by_its_own_length() -> None:
    """A step that verifies drafts has several rows of one sequence."""
    sampler = Sampler(2, VOCAB_SIZE, "cpu")
    sampler.add(1, SamplingParams(temperature=0.0, min_tokens=3, logit_bias=((5, 20.0),)), [1], [2], STOP)
    logits = torch.arange(float(VOCAB_SIZE)).repeat(4, 1)
    sampled = sampler.sample(logits, [1, 1, 1, 1], np.arange(2, 6), np.arange(1, 5))
    assert sampled.token_ids.tolist() == [10, 10, 5, 5]


def test_editors_allocate_memory_only_when_needed() -> None:
    num_slots, vocab_size = 10_000, 10**10  # a byte for every pair would be 100 TB
    sampler = Sampler(num_slots, vocab_size, "cpu")
    sampler.add(0, SamplingParams(temperature=0.0), [1], [], STOP)
    with pytest.raises(RuntimeError):
        sampler.add(1, SamplingParams(repetition_penalty=1.1), [1], [], STOP)
