"""Blocks of every format come back from host memory bit by bit, and no change on the way goes unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.tiers.block_copier import CpuBlockCopier, checksum_weights, checksums
from tests.support.examples import examples

CPU = torch.device("cpu")
NUM_BLOCKS = 7
NUM_WORDS = 192
PLAIN = KVCacheSpec(NUM_BLOCKS, 4, 2, 8, torch.float32, (None,) * 3)
SPECS = {
    "float32": PLAIN,
    "bfloat16": replace(PLAIN, dtype=torch.bfloat16),
    "int8 with scales": replace(PLAIN, dtype=torch.int8),
    "fp8": replace(PLAIN, dtype=torch.float8_e4m3fn),
    "some layers in another dtype": replace(PLAIN, dtype=torch.int8, exceptions={1: torch.bfloat16}),
    "latent": replace(PLAIN, has_values=False, num_kv_heads=1),
    "no multiple of a word": replace(PLAIN, block_size=1, num_kv_heads=1, head_dim=3, dtype=torch.int8),
}
SHAPES: dict[str, Callable[[KVCacheSpec], Callable[[int], tuple[int, ...]]]] = {
    "token-major": lambda spec: spec.token_major_block,
    "head-major": lambda spec: spec.head_major_block,
}


def random_storage(spec: KVCacheSpec, shape: str = "token-major") -> BlockStorage:
    storage = BlockStorage(spec, SHAPES[shape](spec), CPU)
    for tensor in tensors_of(storage):
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    return storage


def tensors_of(storage: BlockStorage) -> list[torch.Tensor]:
    """The bytes of each layer's blocks, and of those scales that lie in blocks, [num_blocks + 1, size]."""
    parts = [*storage.layers, *(each for each in storage.scales if each is not None and len(each) > 2)]
    return [part.flatten(1).view(torch.uint8) for part in parts]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SPECS)
def test_blocks_come_back_as_they_were(name: str, shape: str) -> None:
    source, target = random_storage(SPECS[name], shape), random_storage(SPECS[name], shape)
    expected = [tensor.clone() for tensor in tensors_of(target)]
    for tensor, original in zip(expected, tensors_of(source), strict=True):
        tensor[4], tensor[0], tensor[6] = original[1], original[5], original[NUM_BLOCKS]
    rows = torch.zeros(4, source.block_words, dtype=torch.int64)
    sums = CpuBlockCopier(source, rows).read([1, 5, NUM_BLOCKS], [2, 0, 3])
    other = CpuBlockCopier(target, rows)
    found = other.finish([other.write([4, 0], [2, 0]), other.write([6], [3])])
    assert found == sums and len(set(sums)) == 3
    for tensor, each in zip(tensors_of(target), expected, strict=True):
        assert torch.equal(tensor, each)


def test_a_copy_has_as_many_blocks_as_its_room() -> None:
    storage = random_storage(PLAIN)
    assert storage.block_words * 8 == PLAIN.block_bytes
    rows = torch.zeros(1, storage.block_words, dtype=torch.int64)
    assert CpuBlockCopier(storage, rows, staging_bytes=2 * PLAIN.block_bytes + 1).max_blocks == 2
    assert CpuBlockCopier(storage, rows, staging_bytes=1).max_blocks == 1


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_a_checksum_is_of_the_content_and_of_its_order(data: st.DataObject) -> None:
    weights = checksum_weights(NUM_WORDS)
    words = torch.randint(-(2**63), 2**63 - 1, (1, NUM_WORDS))
    changed = words.clone()
    content = changed.view(torch.uint8)[0]
    if data.draw(st.booleans()):
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        left, right = (data.draw(st.integers(0, NUM_WORDS - 1)) for _ in range(2))
        changed[0, [left, right]] = changed[0, [right, left]]
    is_equal = torch.equal(words, changed)
    assert (checksums(words, weights) == checksums(changed, weights)).item() is is_equal


def test_a_checksum_is_the_weighted_sum_modulo_2_to_64() -> None:
    units = torch.eye(NUM_WORDS, dtype=torch.int64)
    weights = checksums(units, checksum_weights(NUM_WORDS)).tolist()
    assert all(weight % 2 for weight in weights) and len(set(weights)) == len(weights)
    words = torch.randint(-(2**63), 2**63 - 1, (2, NUM_WORDS))
    for row, checksum in zip(words.tolist(), checksums(words, checksum_weights(NUM_WORDS)).tolist(), strict=True):
        assert (sum(word * weight for word, weight in zip(row, weights, strict=True)) - checksum) % 2**64 == 0
