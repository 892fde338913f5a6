"""Parts of a sequence in several KV caches: what each makes of its part, merged, is attention over all keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.split_context.parted_attention import PartedTorchAttention
from services.attn_worker.split_context.parted_cache import PartedKVCache
from services.channel.log_sums import log_sums_of
from services.common.errors import CapacityError, InvalidRequest
from services.dense_worker.attention_workers.split_context.shared_rows import SharedRows
from services.step import StepPlan
from tests.support.attention.harness import BLOCK_SIZE, CPU, MAX_MODEL_LEN, NUM_BLOCKS, TOLERANCES, Harness
from tests.support.plans import make_plan

PARTS = (range(0, 12), range(12, 20), range(20, 60))  # of sequence 0, one in each KV cache
OTHER = 1  # a sequence that the last cache has as a whole


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Split:
    """Attention workers of which each has a part of sequence 0, beside a harness that knows the inputs."""

    def __init__(self, path: Path, heads: tuple[int, int], dtype: torch.dtype) -> None:
        self.harness = Harness(path, heads, dtype)
        spec, config = self.harness.spec, self.harness.config
        sizes = (NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
        self.caches = [build_cache(*sizes, make_cache=PartedKVCache) for _ in PARTS]
        self.backends = [PartedTorchAttention(config, spec, dtype, CPU, 32) for _ in PARTS]  # tables end before
        for backend in self.backends:
            for blocks in backend.storage.layers:
                blocks.fill_(100.0)  # of others, before
        for cache, part in zip(self.caches, PARTS, strict=True):
            cache.open_part(0, part)

    def check(self, *advances: tuple[int, int]) -> None:
        """Runs a step, and compares all rows of all layers with the reference."""
        harness, lengths = self.harness, self.harness.lengths
        counts = [count for _, count in advances]
        of_rows = np.repeat([seq_id for seq_id, _ in advances], counts)
        all_rows = [np.flatnonzero((of_rows == 0) | ((of_rows == OTHER) & (part is PARTS[-1]))) for part in PARTS]
        for cache, backend, part in zip(self.caches, self.backends, PARTS, strict=True):
            own = [(each, n, lengths[each]) for each, n in advances if each == 0 or part is PARTS[-1]]
            planned = cache.plan_step(make_plan(own))
            assert planned.errors == {} and planned.metadata.num_rows == sum(n for _, n, _ in own)
            backend.begin_step(planned.metadata)
        shared = SharedRows([torch.from_numpy(each) for each in all_rows], len(of_rows))
        assert shared.rows.tolist() == np.flatnonzero(of_rows == 0).tolist()
        outputs = []
        for layer in range(harness.config.num_layers):
            rows = [harness.inputs[each][layer, lengths[each] : lengths[each] + n] for each, n in advances]
            outputs.append(self.attend(layer, torch.cat(rows), all_rows, shared))
        for cache in self.caches:
            cache.commit_step()
        for seq_id, count in advances:
            lengths[seq_id] += count
        for layer, out in enumerate(outputs):
            expected = [harness.reference(seq_id, layer)[-n:] for seq_id, n in advances]
            torch.testing.assert_close(out.float(), torch.cat(expected), **TOLERANCES[harness.dtype])

    def attend(
        self, layer: int, qkv: torch.Tensor, all_rows: Sequence[np.ndarray], shared: SharedRows
    ) -> torch.Tensor:
        config = self.harness.config
        out = torch.full((len(qkv), config.attn_size), torch.nan, dtype=qkv.dtype)
        parts = []
        for backend, rows in zip(self.backends, all_rows, strict=True):
            own = qkv[rows]
            of_part = torch.full((len(rows), config.attn_size), torch.nan, dtype=qkv.dtype)
            backend.forward(layer, own, of_part)
            out[rows] = of_part
            parts.append((of_part, log_sums_of(own, config.q_size, config.num_heads)))
        out[shared.rows] = shared.merge(parts)
        return out


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
def test_parts_merged_are_attention_over_the_whole_context(
    tmp_path: Path, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    split = Split(tmp_path, heads, dtype)
    split.harness.open(0, 50)
    split.harness.open(OTHER, 20)
    split.caches[-1].open_sequence(OTHER, [OTHER] * 20, 20)
    split.check((0, 5))  # within the first part
    split.check((OTHER, 9), (0, 18))  # over all three, beside a prompt
    split.check((0, 1), (OTHER, 11))
    split.check((OTHER, 1))
    split.check((0, 26), (OTHER, 1))
    for _ in range(3):
        split.check((OTHER, 1), (0, 1))


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
    cache.open_sequence(3, [3] * 6, 6)
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
