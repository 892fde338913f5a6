"""State spaces, scans and short convolutions: the kernels give the results of the torch reference, and its states."""

from __future__ import annotations

import pytest
import torch

from services.attn_worker.cache.state_group import StateWave, null_slot, zero_slot
from services.attn_worker.layers.recurrent.torch_recurrences import TorchRecurrences
from services.common.attention.learned import Learned
from services.common.families.shape import SelectiveScan, ShortConvolution, StateSpace
from tests.support.attention.gated_layers import make_gated_spec, random_rows, recurrent_step
from tests.support.attention.state_spaces import Sizes, random_state_space_weights

NUM_SLOTS = 6
ZERO, NULL = zero_slot(NUM_SLOTS), null_slot(NUM_SLOTS)
NO_LIMITS = (0.0, float("inf"))
CASES = {
    "grouped": StateSpace(6, 8, 12, 2, 4, has_conv_bias=True, time_step_limits=NO_LIMITS),
    "limits": StateSpace(2, 40, 6, 1, 2, has_conv_bias=False, time_step_limits=(0.3, 1.1)),
    "convolution": ShortConvolution(300, 3, has_conv_bias=True),
    "without bias": ShortConvolution(20, 4, has_conv_bias=False),
    "activated": ShortConvolution(20, 4, has_conv_bias=True, is_activated=True),
    "scan": SelectiveScan(num_channels=70, state_size=5, time_step_rank=3),
}
# Sums in another order; with 16 bits one rounding of the convolution's sums and one of the output may differ.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
STEPS = (  # (number of tokens, source, target) of each part of a wave, and the padded number of parts
    ([(40, ZERO, 0), (3, ZERO, 1), (1, ZERO, 2)], None),
    ([(150, 0, 3), (33, 1, 4), (31, 2, 5)], None),  # three chunks, the last one not full; one; none
    ([(1, 3, 0), (1, 4, 1)], 4),
    ([(2, 0, 3), (1, 1, 4), (5, 5, NULL)], None),
    ([(1, 3, 2), (1, 4, 0)], 2),
)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
def test_prompts_and_padded_decode_steps(
    sizes: Sizes, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    triton = pytest.importorskip("services.attn_worker.layers.recurrent.triton_recurrences", reason="needs triton")
    if kernel_device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter does not round to the nearest bfloat16")
    spec = make_gated_spec(sizes, NUM_SLOTS)
    reference = TorchRecurrences(spec, kernel_device)
    kernels = triton.TritonRecurrences(spec, dtype, kernel_device, max_num_seqs=4, max_num_tokens=256)
    for backend in (reference, kernels):
        backend.use_learned(Learned(recurrences={0: random_state_space_weights(sizes)}))
    for seed, (parts, padded) in enumerate(STEPS):
        wave, num_tokens = StateWave(), 0
        for part in parts:
            wave.add(num_tokens, *part)
            num_tokens += part[0]
        num_rows = num_tokens if padded is None else padded
        rows = random_rows(sizes, num_rows, seed).to(kernel_device, dtype)
        found, expected = (torch.zeros(num_rows, sizes.value_size, dtype=dtype, device=kernel_device) for _ in "ab")
        reference.begin_step(recurrent_step(wave))
        kernels.begin_step(recurrent_step(wave), padded)
        reference.forward(0, rows, expected)
        kernels.forward(0, rows, found)
        error = (found.float() - expected.float()).abs().max()
        assert error <= TOLERANCES[dtype] * expected.float().abs().max(), f"step {seed}"
        assert not found[num_tokens:].any(), "padding becomes zero"
