"""Attention among packed sequences on a GPU equals the plain formula, in every dtype and by both ways to compute it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.dense_worker.encoders.packed_attention import PackedSequences, PositionTerms, attend
from tests.unit.dense_worker.encoders.test_packed_attention import CASES, LENGTHS, by_formula, random_qkv

pytestmark = pytest.mark.gpu
# Of values up to 3; 16 bits round the weights, too.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def to_gpu(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, PositionTerms):
        keys, queries = (None if each is None else each.to("cuda", dtype) for each in (value.keys, value.queries))
        return PositionTerms(keys, queries, value.rows.cuda())
    return value.cuda() if torch.is_tensor(value) else value


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_equals_the_formula(options: dict[str, Any], dtype: torch.dtype) -> None:
    qkv = [each.to("cuda", dtype) for each in random_qkv(sum(LENGTHS))]
    on_gpu = {name: to_gpu(value, dtype) for name, value in options.items()}
    found = attend(*qkv, PackedSequences(LENGTHS, "cuda"), **on_gpu).double().cpu()
    wanted = by_formula(*(each.cpu() for each in qkv), **options)
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_host_waits_for_nothing(options: dict[str, Any]) -> None:
    qkv = [each.cuda() for each in random_qkv(sum(LENGTHS))]
    on_gpu = {name: to_gpu(value, torch.float32) for name, value in options.items()}
    attend(*qkv, PackedSequences(LENGTHS, "cuda"), **on_gpu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(*qkv, PackedSequences(LENGTHS, "cuda"), **on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_heads_of_queries_share_keys_and_values(num_kv_heads: int) -> None:
    qkv = [each.to("cuda", torch.float16) for each in random_qkv(sum(LENGTHS), num_kv_heads)]
    found = attend(*qkv, PackedSequences(LENGTHS, "cuda")).double().cpu()
    wanted = by_formula(*(each.cpu() for each in qkv))
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCES[torch.float16])
