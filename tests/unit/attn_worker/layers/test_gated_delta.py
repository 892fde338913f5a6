"""Gated delta layers in torch against the functions of `transformers`, whatever the parts a sequence runs in."""

from __future__ import annotations

import pytest
import torch

from services.attn_worker.cache.state_group import StateWave, null_slot, zero_slot
from services.attn_worker.layers.recurrent.state_storage import StateStorage
from services.attn_worker.layers.recurrent.torch_recurrences import TorchRecurrences
from services.common.attention.learned import Learned, RecurrenceWeights
from services.common.errors import CapacityError
from services.common.families.shape import GatedDelta
from tests.support.attention.gated_layers import (
    make_gated_spec,
    random_gated_weights,
    random_rows,
    recurrent_step,
    true_values,
)

CPU = torch.device("cpu")
NUM_SLOTS = 6
ZERO, NULL = zero_slot(NUM_SLOTS), null_slot(NUM_SLOTS)
SIZES = GatedDelta(num_key_heads=2, num_value_heads=6, key_dim=8, value_dim=12, conv_size=4)
# Both compute in float32, in another order of sums of some ten numbers and, in chunks, by another formula.
BOUND = 1e-5


def wave(*parts: tuple[int, int, int, int]) -> StateWave:
    result = StateWave()
    for part in parts:
        result.add(*part)
    return result


def run(backend: TorchRecurrences, rows: torch.Tensor, *waves: StateWave, sizes: GatedDelta = SIZES) -> torch.Tensor:
    out = torch.full((len(rows), sizes.value_size), 77.0, dtype=rows.dtype)
    backend.begin_step(recurrent_step(*waves))
    backend.forward(0, rows, out)
    return out


def make_backend(sizes: GatedDelta = SIZES) -> tuple[TorchRecurrences, RecurrenceWeights]:
    backend, weights = TorchRecurrences(make_gated_spec(sizes, NUM_SLOTS), CPU), random_gated_weights(sizes)
    backend.use_learned(Learned(recurrences={0: weights}))
    return backend, weights


def check(found: torch.Tensor, expected: torch.Tensor, bound: float = BOUND) -> None:
    assert (found - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize(
    "sizes",
    [SIZES, GatedDelta(1, 1, 16, 16, 2), GatedDelta(4, 4, 4, 20, 3), GatedDelta(2, 4, 128, 128, 4)],
    ids=["grouped", "one head", "short convolution", "published heads"],
)
def test_chunks_and_tokens_give_what_transformers_gives(sizes: GatedDelta) -> None:
    backend, weights = make_backend(sizes)
    rows = random_rows(sizes, 200)
    out = [
        run(backend, rows[:130], wave((0, 130, ZERO, 0)), sizes=sizes),  # three chunks, the last one of two tokens
        run(backend, rows[130:131], wave((0, 1, 0, 1)), sizes=sizes),
        run(backend, rows[131:132], wave((0, 1, 1, 0)), sizes=sizes),
        run(backend, rows[132:134], wave((0, 2, 0, 1)), sizes=sizes),  # fewer than the convolution reads
        run(backend, rows[134:], wave((0, 66, 1, 2)), sizes=sizes),
    ]
    check(torch.cat(out), true_values(rows, weights, sizes))


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    """Two of equal length, a longer one, one that decodes, and one that cannot run."""
    backend, weights = make_backend()
    texts = [random_rows(SIZES, 90, seed) for seed in range(4)]
    run(backend, texts[3][:20], wave((0, 20, ZERO, 3)))
    batch = torch.cat((texts[0][:9], texts[1][:9], texts[2][:80], texts[3][20:21], texts[0][:5]))
    parts = wave((0, 9, ZERO, 0), (9, 9, ZERO, 1), (18, 80, ZERO, 2), (98, 1, 3, 4), (99, 5, ZERO, NULL))
    first, second, third, fourth, _ = run(backend, batch, parts).split((9, 9, 80, 1, 5))
    for found, text, start in ((first, 0, 0), (second, 1, 0), (third, 2, 0), (fourth, 3, 20)):
        check(found, true_values(texts[text], weights, SIZES)[start : start + len(found)])
    batch = torch.cat((texts[1][9:10], texts[0][9:10], texts[3][21:22]))
    decoded = run(backend, batch, wave((0, 1, 1, 5), (1, 1, 0, 1), (2, 1, 4, 3)))
    for row, (text, position) in enumerate(((1, 9), (0, 9), (3, 21))):
        check(decoded[row], true_values(texts[text], weights, SIZES)[position])


def test_a_state_within_a_step_starts_another_sequence() -> None:
    backend, weights = make_backend()
    text, other = random_rows(SIZES, 100, 1), random_rows(SIZES, 30, 2)
    out = run(backend, text, wave((0, 64, ZERO, 4)), wave((64, 36, 4, 5)))
    check(out, true_values(text, weights, SIZES))
    found = run(backend, other, wave((0, 30, 4, 0)))
    check(found, true_values(torch.cat((text[:64], other)), weights, SIZES)[64:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_16_bits(dtype: torch.dtype) -> None:
    """Sums of the convolution are rounded as in `transformers`; the recurrence is in float32."""
    backend, weights = make_backend()
    rows = random_rows(SIZES, 80).to(dtype)
    out = torch.cat((run(backend, rows[:70], wave((0, 70, ZERO, 0))), run(backend, rows[70:], wave((0, 10, 0, 1)))))
    check(out.float(), true_values(rows, weights, SIZES).float(), bound=4 * torch.finfo(dtype).eps)


def test_strong_decays_do_not_overflow() -> None:
    """Within a chunk the inverse of a decay may be larger than float32 can hold."""
    backend, _ = make_backend()
    strong = random_gated_weights(SIZES)
    strong = RecurrenceWeights(strong.conv, (4.0,) * 6, (3.0,) * 6)
    backend.use_learned(Learned(recurrences={0: strong}))
    rows = random_rows(SIZES, 64)
    out = run(backend, rows, wave((0, 64, ZERO, 0)))
    assert out.isfinite().all()
    check(out, true_values(rows, strong, SIZES))


def test_memory_that_is_too_small_is_an_error() -> None:
    spec = make_gated_spec(GatedDelta(16, 32, 128, 128, 4), 10**9)
    with pytest.raises(CapacityError, match=rf"1000000002 states need {1000000002 * spec.state_bytes} bytes on cpu"):
        StateStorage(spec, CPU)
