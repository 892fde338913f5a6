"""Cross attention: the kernel gives the results of the torch reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.attn_worker.cache.build_cache import SourceSlots
from services.attn_worker.cache.source_group import StepSources
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.step_metadata import build_step_metadata
from services.attn_worker.layers.cross.torch_cross_attention import TorchCrossAttention
from services.common.families.shape import LayerHeads

NUM_SLOTS, MAX_SOURCE_LEN, MAX_NUM_TOKENS = 4, 300, 64
# Sums in another order; with 16 bits one rounding of the output may be to the other neighbour.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 64), (3, 1, 12), (4, 2, 40)])
def test_the_kernel_equals_the_reference(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, kernel_device: torch.device
) -> None:
    kernels = pytest.importorskip("services.attn_worker.layers.cross.triton_cross_attention", reason="needs triton")
    if kernel_device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter does not round to the nearest bfloat16")
    heads = LayerHeads(num_heads, num_kv_heads, head_dim, is_cross=True)
    spec = KVCacheSpec(2, 4, num_kv_heads, head_dim, dtype, (None,), layer_heads=(heads,))
    spec = replace(spec, source_slots=SourceSlots(NUM_SLOTS, MAX_SOURCE_LEN))
    reference = TorchCrossAttention(spec, None, kernel_device)
    triton = kernels.TritonCrossAttention(spec, None, kernel_device, MAX_NUM_TOKENS)
    generator = torch.Generator().manual_seed(7)
    stored = torch.randn(reference.storage.layers[0].shape, generator=generator).to(kernel_device, dtype)
    for backend in (reference, triton):
        backend.storage.layers[0].copy_(stored)
    num_tokens = np.array([1, 5, 2, 1])
    none = np.zeros(4, np.int64)
    metadata = build_step_metadata(num_tokens, none, num_tokens, np.zeros((4, 2), np.int32), 4)
    sources = StepSources(np.array([2, 0, 2, NUM_SLOTS]), np.array([MAX_SOURCE_LEN, 7, MAX_SOURCE_LEN, 1]))
    step = metadata.with_other(sources)
    query = torch.randn(16, num_heads * head_dim, generator=generator).to(kernel_device, dtype)
    expected, found = torch.zeros_like(query), torch.zeros_like(query)
    reference.begin_step(step)
    reference.forward(0, query[:9], expected[:9])
    triton.begin_step(step, padded_num_rows=16)
    triton.forward(0, query, found)
    assert (found[:9].float() - expected[:9].float()).abs().max() <= TOLERANCES[dtype] * expected.float().abs().max()
    assert found[9:].isfinite().all()  # padding
