"""A KV cache of 8 bits, compared with attention in float64 over keys and values rounded by torch's own conversions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.common.attention.learned import Learned
from services.common.kv_cache.scales import KVScales
from tests.support.attention.harness import BLOCK_SIZE, TOLERANCES, Harness
from tests.support.attention.open_now import open_sequence

FP8, INT8 = torch.float8_e4m3fn, torch.int8
FORMATS = pytest.mark.parametrize("cache_dtype", [FP8, INT8], ids=["fp8", "int8"])
SCALES = KVScales((0.03, 0.5), (0.011, 2.0))  # of the harness's two layers; its numbers are normal
# ‖out − reference‖ / ‖reference‖. The reference rounds like the cache, so what is left is the arithmetic of the model's
# dtype, and the elements that it moves across the middle between two stored numbers: with bfloat16, which has 4 bits
# more than e4m3, every sixteenth or so, by up to 2^-3 of itself.
SAME_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 4e-2, torch.float16: 2e-2}
# The same in float32 with a reference that rounds nothing. e4m3 has 3 bits after the leading one: a number moves by at
# most 2^-4 of itself, 2.6 % on average, and the products of a dot product move independently. int8 moves a number by at
# most 1/254 of the largest of its head, which for normal numbers is about 2 deviations: 0.5 % on average.
QUANTIZATION_ERROR = {FP8: 5e-2, INT8: 1e-2}


@pytest.fixture(autouse=True)
def _one_thread_without_gradients() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
    torch.set_num_threads(num_threads)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def check(harness: Harness, *advances: tuple[int, int], fork: tuple[int, int] | None = None) -> None:
    """Runs a step; compares it with the reference that rounds like the cache, and with the one that does not."""
    outputs = harness.step(*advances, fork=fork)
    for layer, out in enumerate(outputs):
        expected, exact = (
            torch.cat([harness.reference(seq_id, layer, is_exact=is_exact)[-n:] for seq_id, n in advances])
            for is_exact in (False, True)
        )
        assert relative_error(out, expected) < SAME_ROUNDING[harness.dtype]
        assert relative_error(out, exact) < QUANTIZATION_ERROR[harness.spec.dtype] + SAME_ROUNDING[harness.dtype]


@FORMATS
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_prefill_chunks_decodes_and_mixed_batches(
    tmp_path: Path, cache_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    harness = Harness(tmp_path, dtype=dtype, cache_dtype=cache_dtype, scales=SCALES, windows=(None, 9))
    for seq_id, prompt_len in enumerate([5, 1, 23]):
        harness.open(seq_id, prompt_len)
    check(harness, (0, 5), (2, 10))
    check(harness, (1, 1), (2, 7), (0, 1))
    check(harness, (2, 6), (0, 3))
    for _ in range(5):
        check(harness, (0, 1), (1, 1), (2, 1))


@FORMATS
@pytest.mark.parametrize("length", [2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1])
def test_a_fork_gets_a_copy_of_the_last_block_with_its_scales(
    tmp_path: Path, cache_dtype: torch.dtype, length: int
) -> None:
    harness = Harness(tmp_path, cache_dtype=cache_dtype, scales=SCALES)
    harness.open(0, length)
    check(harness, (0, length))
    check(harness, (0, 1), (1, 1), fork=(0, 1))
    check(harness, (1, 3), (0, 1))


@FORMATS
def test_a_prefix_computed_by_another_sequence_is_read(tmp_path: Path, cache_dtype: torch.dtype) -> None:
    harness = Harness(tmp_path, cache_dtype=cache_dtype, scales=SCALES)
    harness.open(0, 12)
    outputs = harness.step((0, 12))
    assert open_sequence(harness.cache, 1, [0] * 12, 12).num_cached_tokens == 8
    harness.inputs[1], harness.prompt_lens[1], harness.lengths[1] = harness.inputs[0], 12, 8
    for found, expected in zip(harness.step((1, 4)), outputs, strict=True):
        torch.testing.assert_close(found, expected[8:], rtol=0, atol=1e-6)  # stored once, so only sums may differ


@FORMATS
def test_excepted_layers_stay_in_the_dtype_of_the_model(tmp_path: Path, cache_dtype: torch.dtype) -> None:
    harness = Harness(tmp_path, cache_dtype=cache_dtype, scales=SCALES, exceptions={0: torch.float32})
    harness.open(0, 14)
    harness.open(1, 5)
    for advances in [((0, 9), (1, 5)), ((0, 5), (1, 1)), ((1, 1), (0, 1))]:
        outputs = harness.step(*advances)
        errors = []
        for layer, out in enumerate(outputs):
            exact = torch.cat([harness.reference(seq_id, layer, is_exact=True)[-n:] for seq_id, n in advances])
            errors.append(relative_error(out, exact))
        assert errors[0] < 1e-6 < 1e-3 < errors[1] < QUANTIZATION_ERROR[cache_dtype]


def test_what_is_beyond_the_range_of_fp8_becomes_its_largest_number(tmp_path: Path) -> None:
    harness = Harness(tmp_path, cache_dtype=FP8, scales=KVScales((1e-3, 1e-3), (1e-3, 1e-3)))
    harness.open(0, 6)
    harness.open(1, 7)
    config, largest = harness.config, 448 * 1e-3
    harness.inputs[0][..., -config.kv_size :] = 1e30  # the values
    harness.inputs[0][:, 3, -config.kv_size :] = -torch.inf  # of this token 0, as in a cache without scales
    outputs = harness.step((0, 6), (1, 7))
    for layer, out in enumerate(outputs):
        torch.testing.assert_close(out[:3], torch.full_like(out[:3], largest))
        assert (out[3:6] > 0).all() and (out[3:6] < largest).all()
        assert relative_error(out[6:], harness.reference(1, layer)) < SAME_ROUNDING[torch.float32]


@FORMATS
def test_bad_values_stay_in_the_rows_of_their_own_sequence(tmp_path: Path, cache_dtype: torch.dtype) -> None:
    harness = Harness(tmp_path, cache_dtype=cache_dtype, scales=SCALES)
    harness.open(0, 6)
    harness.open(1, 7)
    harness.inputs[0][:, 2:] = torch.nan
    harness.inputs[0][:, 4:] = torch.inf
    harness.inputs[0][:, 5:] = 1e30
    outputs = harness.step((0, 6), (1, 7))
    for layer, out in enumerate(outputs):
        assert relative_error(out[6:], harness.reference(1, layer)) < SAME_ROUNDING[torch.float32]
    harness.cache.close_sequences([0])
    harness.open(2, 5)
    check(harness, (1, 1), (2, 1))  # the rest of the block contains values of sequence 0
    check(harness, (1, 1), (2, 4))


@FORMATS
def test_heads_of_zeros_and_of_tiny_numbers_are_stored(tmp_path: Path, cache_dtype: torch.dtype) -> None:
    harness = Harness(tmp_path, cache_dtype=cache_dtype, scales=SCALES)
    harness.open(0, 6)
    kv_size = harness.config.kv_size
    harness.inputs[0][:, :3, -kv_size:] = 0.0
    harness.inputs[0][:, 3:, -kv_size:] = 1e-42
    for out in harness.step((0, 6)):
        assert (out.abs() <= 2e-42).all()
        assert (out[:3] == 0).all()


def test_other_scales_change_what_is_stored(tmp_path: Path) -> None:
    """With scales as large as the numbers a step of e4m3 near 0 (2^-9) is seen; without, it is not."""
    harness = Harness(tmp_path, cache_dtype=FP8)
    fitting, coarse = KVScales.ones(2), KVScales((1024.0, 1024.0), (1024.0, 1024.0))
    for seq_id, scales in enumerate((fitting, coarse)):
        harness.scales = scales
        harness.backend.use_learned(Learned(scales))
        harness.open(seq_id, 20)
        for layer, out in enumerate(harness.step((seq_id, 20))):
            assert relative_error(out, harness.reference(seq_id, layer)) < SAME_ROUNDING[torch.float32]
            error = relative_error(out, harness.reference(seq_id, layer, is_exact=True))
            assert (error < QUANTIZATION_ERROR[FP8]) is (scales is fitting)
