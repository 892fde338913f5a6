"""Rules of timestamps, compared with transformers' processor of logits on random outputs."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from services.common.sampling_params import SamplingParams, TimestampRules
from services.dense_worker.sampling.editors.timestamps import Timestamps
from services.dense_worker.sampling.logits_editor import EditedRows, EditedSequence

VOCAB_SIZE, END, NONE, FIRST = 40, 20, 24, 25
CPU = torch.device("cpu")
PROMPT = [21, 22]


def true_logits(output: list[int], logits: torch.Tensor, last_initial: int | None) -> torch.Tensor:
    config = SimpleNamespace(
        no_timestamps_token_id=NONE,
        eos_token_id=END,
        bos_token_id=END,
        max_initial_timestamp_index=None if last_initial is None else last_initial - FIRST,
        _detect_timestamp_from_logprob=True,
    )
    processor = WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))
    return processor(torch.tensor([PROMPT + output]), logits[None].clone())[0]


@pytest.mark.parametrize("last_initial", [None, FIRST + 3])
def test_outputs_that_grow_and_that_are_resumed(last_initial: int | None) -> None:
    rules = TimestampRules(FIRST, END, last_initial)
    generator, rng = torch.Generator().manual_seed(3), random.Random(3)
    for _ in range(20):
        grown, resumed, output = Timestamps(4, VOCAB_SIZE, CPU), Timestamps(4, VOCAB_SIZE, CPU), list[int]()
        sequence = EditedSequence(SamplingParams(timestamps=rules), PROMPT, (), (END,))
        assert grown.set(2, sequence)
        for length in range(14):
            logits = 2 * torch.randn(VOCAB_SIZE, generator=generator)
            expected = true_logits(output, logits, last_initial)
            rows = EditedRows(np.array([1]), np.array([2]), np.array([length]), CPU)
            assert resumed.set(2, EditedSequence(sequence.params, PROMPT, output, (END,)))
            for editor in (grown, resumed):
                found = torch.stack([torch.zeros(VOCAB_SIZE), logits])
                editor.apply(found, rows)
                assert torch.equal(found[1].isinf(), expected.isinf()) and not found[0].any()
                assert torch.equal(found[1].nan_to_num(neginf=0.0), expected.nan_to_num(neginf=0.0))
            choices = [each for each in torch.nonzero(~expected.isinf()).flatten().tolist() if each != END]
            if not choices:
                break
            output.append(rng.choice(choices))
            grown.append(rows, torch.tensor([7, output[-1]]))
