"""The size of the KV cache: bytes by the definition, and the memory that is allocated."""

from __future__ import annotations

import dataclasses

import pytest
import structlog
import torch

from services.attn_worker.build import make_cache_spec
from services.attn_worker.cache.spec import KVCacheSpec
from services.common.config import AttentionSection, ModelSection
from services.common.errors import CapacityError
from services.common.resolve import ResolvedModel, resolve_model

CPU = torch.device("cpu")
# Llama 3 8B needs 128 KiB per token in 16 bits.
LLAMA = KVCacheSpec(100, 16, 8, 128, torch.bfloat16, (None,) * 32)


def test_a_token_takes_two_vectors_per_kv_head_and_layer() -> None:
    assert (LLAMA.num_layers, LLAMA.kv_size) == (32, 1024)
    assert LLAMA.token_bytes == 128 * 1024
    assert LLAMA.block_bytes == 2 * 1024 * 1024
    assert LLAMA.num_bytes == 200 * 1024 * 1024
    wider = dataclasses.replace(LLAMA, dtype=torch.float32, windows=(None, 8))
    assert wider.token_bytes == 2 * 2 * 1024 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_both_layouts_have_all_blocks_and_the_null_block(dtype: torch.dtype) -> None:
    spec = KVCacheSpec(5, 4, 2, 16, dtype, (None, 6, None))
    for shape in (spec.token_major_shape, spec.head_major_shape):
        cache = spec.allocate(shape, CPU)
        assert cache.shape[:2] == (3, 5 + 1)
        assert cache.dtype == dtype and not cache.any()
        assert cache.nbytes == spec.num_bytes + spec.block_bytes


def test_the_error_for_a_cache_that_does_not_fit_names_its_size() -> None:
    spec = dataclasses.replace(LLAMA, num_blocks=10**12)
    with pytest.raises(CapacityError, match=f"{10**12 + 1} KV blocks need {(10**12 + 1) * 2**21} bytes on cpu"):
        spec.allocate(spec.head_major_shape, CPU)


@pytest.fixture(scope="module")
def model() -> ResolvedModel:
    return resolve_model(ModelSection(), "cpu")


def test_the_cache_has_as_many_blocks_as_fit_and_logs_their_number(model: ResolvedModel) -> None:
    config = model.config
    block_bytes = 2 * config.num_layers * 16 * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    with structlog.testing.capture_logs() as events:
        spec = make_cache_spec(AttentionSection(block_size=16, kv_cache_bytes=10 * block_bytes - 1), model)
    assert spec == KVCacheSpec(9, 16, config.num_kv_heads, config.head_dim, model.dtype, config.sliding_windows)
    assert [(event["num_blocks"], event["bytes"]) for event in events] == [(9, 9 * block_bytes)]
    assert make_cache_spec(AttentionSection(block_size=16, num_blocks=33), model).num_blocks == 33
    with pytest.raises(CapacityError, match=f"is {block_bytes - 1} bytes, one block of 16 tokens takes {block_bytes}"):
        make_cache_spec(AttentionSection(block_size=16, kv_cache_bytes=block_bytes - 1), model)
