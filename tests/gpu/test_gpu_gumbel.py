"""The Triton kernel that samples tokens gives the random bits, noise and tokens of its reference on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.dense_worker.sampling import gumbel
from services.dense_worker.sampling.philox import token_words

pytest.importorskip("triton", reason="needs triton")

import triton
import triton.language as tl

from services.dense_worker.sampling import triton_gumbel

SEEDS = np.array([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15], dtype=np.uint64)
POSITIONS = np.array([0, 1, 2**31, 2**32, 7, 131_071, 2**62], dtype=np.uint64)
# The noise is at most 23 and is rounded to float32 (2^-20), after two logarithms with errors of up to 2 units in the
# last place. Two tokens whose scores are this close may therefore change places.
NOISE_TOLERANCE = 1e-5


@triton.jit
def _words_kernel(words, seed_at, position_at, num_blocks, BLOCK_SIZE: tl.constexpr):  # noqa: ANN001, ANN202
    block = tl.arange(0, BLOCK_SIZE)
    found = triton_gumbel.token_block(tl.load(seed_at), tl.load(position_at), block)
    for i in tl.static_range(4):
        tl.store(words + block * 4 + i, found[i].to(tl.int64, bitcast=True), mask=block < num_blocks)


@triton.jit
def _noise_kernel(noise, bits, size, BLOCK_SIZE: tl.constexpr):  # noqa: ANN001, ANN202
    at = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    found = tl.load(bits + at, mask=at < size, other=0).to(tl.uint32)
    tl.store(noise + at, triton_gumbel.gumbel_noise(found), mask=at < size)


@pytest.mark.parametrize("row", range(len(SEEDS)))
def test_random_bits_equal_those_of_the_host(kernel_device: torch.device, row: int) -> None:
    num_blocks = 50
    keys = np.stack((SEEDS, POSITIONS))[:, row].view(np.int64)
    seed, position = torch.from_numpy(keys).to(kernel_device).split(1)
    words = torch.zeros(num_blocks, 4, dtype=torch.int64, device=kernel_device)
    _words_kernel[(1,)](words, seed, position, num_blocks, BLOCK_SIZE=64)
    expected = token_words(SEEDS[row : row + 1], POSITIONS[row : row + 1], 8 * num_blocks)[0]
    assert np.array_equal(words.cpu().numpy().view("<u4").reshape(-1), expected)


def test_noise_equals_that_of_the_host(kernel_device: torch.device) -> None:
    ends = np.arange(2_000)
    random = np.random.default_rng(1).integers(0, 2**32, 100_000)
    powers = 2 ** np.arange(32)
    words = np.concatenate([ends, 2**32 - 1 - ends, random, powers, 2**32 - powers]).astype(np.uint32)
    bits = torch.from_numpy(words.astype(np.int64)).to(kernel_device)
    noise = torch.empty(len(words), dtype=torch.float32, device=kernel_device)
    _noise_kernel[(triton.cdiv(len(words), 1024),)](noise, bits, len(words), BLOCK_SIZE=1024)
    np.testing.assert_allclose(noise.cpu().numpy(), gumbel.gumbel_noise(words), rtol=0, atol=NOISE_TOLERANCE)


@pytest.mark.parametrize("vocab_size", [1, 7, 512, 2_048, 2_049, 32_000])
@pytest.mark.parametrize("num_kept", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tokens_equal_those_of_the_host(
    kernel_device: torch.device, vocab_size: int, num_kept: int | None, dtype: torch.dtype
) -> None:
    num_rows = 20
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 2.5).to(dtype)
    if num_kept is not None and num_kept < vocab_size:
        logits[logits < logits.topk(num_kept).values[:, -1:]] = -torch.inf
    rng = np.random.default_rng(vocab_size)
    temperatures = rng.choice([1e-5, 0.3, 1.0, 2.0], num_rows).astype(np.float32)
    seeds = rng.integers(0, 2**64, num_rows, dtype=np.uint64)
    positions = rng.integers(0, 2**17, num_rows, dtype=np.uint64)
    found = triton_gumbel.draw(logits.to(kernel_device), temperatures, seeds, positions)
    assert found.tolist() == gumbel.draw(logits.float(), temperatures, seeds, positions).tolist()
    for row in (slice(0, 1), slice(num_rows - 1, num_rows)):
        drawn = triton_gumbel.draw(logits[row].to(kernel_device), temperatures[row], seeds[row], positions[row])
        assert drawn.tolist() == found[row].tolist()


def test_equal_scores_give_the_lowest_token(kernel_device: torch.device) -> None:
    logits = torch.zeros(4, 5_000, device=kernel_device)
    logits[0, 3_000:4_500] = torch.inf
    logits[1] = -torch.inf
    logits[2] = torch.nan
    logits[3] = -torch.inf
    logits[3, 4_999] = -1e38
    ones = np.ones(4)
    found = triton_gumbel.draw(logits, ones.astype(np.float32), ones.astype(np.uint64), ones.astype(np.uint64))
    assert found.tolist() == [3_000, 0, 0, 4_999]
