"""The limit of reasoning, against its definition: token by token, and after a sequence was resumed at any place."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.sampling_params import ReasoningLimit, SamplingParams
from services.dense_worker.sampling.sampler import Sampler
from tests.support.examples import examples

VOCAB_SIZE, BEGIN, END = 6, 4, 5
STEPS = 8


def is_forced(limit: ReasoningLimit | None, output: list[int]) -> bool:
    """Whether the next token must be the end marker."""
    if limit is None or END in output or len(output) < limit.max_tokens:
        return False
    return limit.begin_token_id is None or BEGIN in output[:4]


LIMITS = st.none() | st.builds(ReasoningLimit, st.integers(0, 5), st.just(END), st.sampled_from([None, BEGIN]))


@settings(max_examples=examples(150), deadline=None)
@given(
    limits=st.lists(LIMITS, min_size=1, max_size=4),
    wishes=st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=STEPS, max_size=STEPS), min_size=4, max_size=4),
    resumed_at=st.integers(0, STEPS),
)
def test_the_end_marker_is_forced_where_the_limit_is_reached(
    limits: list[ReasoningLimit | None], wishes: list[list[int]], resumed_at: int
) -> None:
    """`wishes`: the tokens that the model would choose."""
    outputs: list[list[int]] = [[] for _ in limits]
    sampler = Sampler(len(limits), VOCAB_SIZE, "cpu")
    slots = list(range(len(limits)))
    for slot, limit in enumerate(limits):
        sampler.add(slot, SamplingParams(temperature=0.0, reasoning_limit=limit), [1], [], [])
    for step in range(STEPS):
        if step == resumed_at:  # a new worker knows only the tokens
            sampler = Sampler(len(limits), VOCAB_SIZE, "cpu")
            for slot, limit in enumerate(limits):
                params = SamplingParams(temperature=0.0, reasoning_limit=limit)
                sampler.add(slot, params, [1], outputs[slot], [])
        expected = [
            END if is_forced(limit, output) else wishes[slot][step]
            for slot, (limit, output) in enumerate(zip(limits, outputs, strict=True))
        ]
        logits = torch.zeros(len(limits), VOCAB_SIZE)
        for slot in slots:
            logits[slot, wishes[slot][step]] = 3.0
        sampled = sampler.sample(logits, slots, np.full(len(slots), 1 + step), np.full(len(slots), step))
        assert sampled.token_ids.tolist() == expected
        for slot, token_id in enumerate(expected):
            outputs[slot].append(token_id)
