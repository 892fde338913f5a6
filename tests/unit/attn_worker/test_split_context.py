"""Parts of a sequence in several KV caches: what each makes of its part, merged, is attention over all keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.split_context.parted_attention import PartedTorchAttention
from services.attn_worker.split_context.parted_cache import PartedKVCache
from services.common.errors import CapacityError, InvalidRequest
from services.dense_worker.attention_workers.split_context.shared_rows import SharedRows
from services.step import StepPlan
from tests.support.attention.harness import BLOCK_SIZE, MAX_MODEL_LEN, TOLERANCES
from tests.support.attention.open_now import open_sequence
from tests.support.attention.split_harness import SplitHarness
from tests.support.plans import make_plan


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
def test_parts_merged_are_attention_over_the_whole_context(
    tmp_path: Path, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    split = SplitHarness(tmp_path, heads, dtype, PartedTorchAttention)
    split.check_all_kinds_of_steps()


def test_a_part_of_a_worker_that_is_gone_is_left_out() -> None:
    shared = SharedRows([torch.tensor([0, 2]), torch.tensor([1, 2])], 3)
    outputs, sums = torch.rand(2, 8), torch.rand(2, 4)
    assert torch.allclose(shared.merge([None, (outputs, sums)]), outputs[1:])
    assert torch.count_nonzero(shared.merge([None, (outputs, torch.full((2, 4), -torch.inf))])) == 0
    assert torch.count_nonzero(shared.merge([None, None])) == 0


def test_blocks_of_a_part_come_back_when_it_is_closed_or_its_dense_worker_is_gone() -> None:
    cache = build_cache(8, BLOCK_SIZE, MAX_MODEL_LEN, make_cache=PartedKVCache)
    result = cache.open_part(1, range(8, 8 + 5 * BLOCK_SIZE))
    assert (result.num_pinned_blocks, cache.num_free_blocks, cache.num_sequences) == (5, 3, 1)
    with pytest.raises(CapacityError, match="4 KV blocks are needed, 3 of 8 are free"):
        cache.open_part(2, range(0, 4 * BLOCK_SIZE))
    assert cache.open_part(1, range(0, 2 * BLOCK_SIZE)).num_freed_blocks == 5, "it is opened anew"
    open_sequence(cache, 3, [3] * 6, 6)
    planned = cache.plan_step(make_plan([(3, 6, 0), (1, 4, 20)]))
    assert planned.errors == {} and cache.num_free_blocks == 4
    cache.commit_step()
    closed = cache.plan_step(StepPlan(2, close_seq_ids=(1,)))
    assert (closed.num_freed_blocks, cache.num_free_blocks) == (2, 6)
    cache.commit_step()
    cache.open_part(4, range(0, BLOCK_SIZE))
    cache.abort_steps()
    assert (cache.num_sequences, cache.num_free_blocks) == (1, 6), "the other one waits for the next dense worker"
    assert cache.orphaned_blocks == {3: 2}
    cache.check_integrity()


def test_impossible_parts_are_refused() -> None:
    cache = build_cache(8, BLOCK_SIZE, MAX_MODEL_LEN, make_cache=PartedKVCache)
    for tokens in (range(2, 8), range(8, 8)):
        with pytest.raises(InvalidRequest, match=f"from {tokens.start} to before {tokens.stop}"):
            cache.open_part(1, tokens)
    with pytest.raises(InvalidRequest, match="keeps whole sequences"):
        build_cache(8, BLOCK_SIZE, MAX_MODEL_LEN).open_part(1, range(0, 8))
