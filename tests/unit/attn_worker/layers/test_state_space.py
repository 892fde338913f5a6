"""State spaces, scans and short convolutions in torch against the formulas, whatever the parts a sequence runs in."""

from __future__ import annotations

import pytest
import torch

from services.attn_worker.cache.state_group import StateWave, zero_slot
from services.attn_worker.layers.recurrent.torch_recurrences import TorchRecurrences
from services.common.attention.learned import Learned
from services.common.families.shape import SelectiveScan, ShortConvolution, StateSpace
from tests.support.attention.gated_layers import make_gated_spec, random_rows, recurrent_step
from tests.support.attention.state_spaces import Sizes, random_state_space_weights, true_outputs

NUM_SLOTS = 4
ZERO = zero_slot(NUM_SLOTS)
NO_LIMITS = (0.0, float("inf"))
CASES = {
    "grouped": StateSpace(6, 8, 12, 2, 4, has_conv_bias=True, time_step_limits=NO_LIMITS),
    "limits": StateSpace(2, 4, 6, 1, 2, has_conv_bias=False, time_step_limits=(0.3, 1.1)),
    "convolution": ShortConvolution(20, 3, has_conv_bias=True),
    "without bias": ShortConvolution(20, 4, has_conv_bias=False),
    "activated": ShortConvolution(20, 4, has_conv_bias=True, is_activated=True),
    "scan": SelectiveScan(num_channels=70, state_size=5, time_step_rank=3),
}
# float32 against float64, in chunks by another formula: relative to the largest number.
BOUND = 1e-5


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
def test_chunks_and_tokens_give_what_the_formulas_give(sizes: Sizes) -> None:
    backend, weights = TorchRecurrences(make_gated_spec(sizes, NUM_SLOTS), torch.device("cpu")), {}
    weights[0] = random_state_space_weights(sizes)
    backend.use_learned(Learned(recurrences=weights))
    texts = [random_rows(sizes, 150, seed) for seed in range(2)]
    expected = [true_outputs(rows, weights[0], sizes) for rows in texts]

    def step(*parts: tuple[int, int, int, int]) -> None:
        """(text, number of tokens, source, target) of each sequence of a batch."""
        wave, rows, first_row = StateWave(), [], 0
        for text, num_tokens, source, target in parts:
            wave.add(first_row, num_tokens, source, target)
            rows.append(texts[text][done[text] : done[text] + num_tokens])
            first_row += num_tokens
        out = torch.full((first_row, sizes.value_size), 77.0)
        backend.begin_step(recurrent_step(wave))
        backend.forward(0, torch.cat(rows), out)
        for (text, num_tokens, _, _), found in zip(parts, out.split([part[1] for part in parts]), strict=True):
            true = expected[text][done[text] : done[text] + num_tokens]
            assert (found - true).abs().max() <= BOUND * expected[text].abs().max()
            done[text] += num_tokens

    done = [0, 0]
    step((0, 130, ZERO, 0))  # three chunks, the last one of two tokens
    step((1, 9, ZERO, 1), (0, 1, 0, 2))
    step((0, 1, 2, 0), (1, 1, 1, 3))
    step((1, 2, 3, 1), (0, 18, 0, 2))  # fewer than the convolution reads
