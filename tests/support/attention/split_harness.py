"""Attention workers of which each has a part of one sequence, compared with attention over its whole context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.layers import AttentionBackend, BackendSetup
from services.attn_worker.split_context.parted_cache import PartedKVCache
from services.channel.log_sums import log_sums_of
from services.dense_worker.attention_workers.split_context.shared_rows import SharedRows
from tests.support.attention.harness import BLOCK_SIZE, CPU, MAX_MODEL_LEN, NUM_BLOCKS, TOLERANCES, Harness
from tests.support.attention.open_now import open_sequence
from tests.support.plans import make_plan

PARTS = (range(0, 12), range(12, 20), range(20, 60))  # of sequence 0, one in each KV cache
OTHER = 1  # a sequence that the last cache has as a whole


class SplitHarness:
    """Attention workers of which each has a part of sequence 0, beside a harness that knows the inputs."""

    def __init__(
        self,
        path: Path,
        heads: tuple[int, int],
        dtype: torch.dtype,
        make_backend: Callable[[BackendSetup], AttentionBackend],
        device: torch.device = CPU,
    ) -> None:
        self.harness = Harness(path, heads, dtype)
        self.device = device
        spec, config = self.harness.spec, self.harness.config
        sizes = (NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
        self.caches = [build_cache(*sizes, make_cache=PartedKVCache) for _ in PARTS]
        setup = BackendSetup(config, spec, dtype, device, max_model_len=32, max_num_seqs=8, max_num_tokens=64)
        self.backends = [make_backend(setup) for _ in PARTS]  # tables end before
        for backend in self.backends:
            for blocks in backend.storage.layers:
                blocks.fill_(100.0)  # of others, before
        for cache, part in zip(self.caches, PARTS, strict=True):
            cache.open_part(0, part)

    def check_all_kinds_of_steps(self) -> None:
        """Chunks and single rows of the split sequence, in one part and over several, alone and beside another one."""
        self.harness.open(0, 50)
        self.harness.open(OTHER, 20)
        open_sequence(self.caches[-1], OTHER, [OTHER] * 20, 20)
        self.check((0, 5))  # within the first part
        self.check((OTHER, 9), (0, 18))  # over all three, beside a prompt
        self.check((0, 1), (OTHER, 11))
        self.check((OTHER, 1))
        self.check((0, 26), (OTHER, 1))
        for _ in range(3):
            self.check((OTHER, 1), (0, 1))

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
            own = qkv[rows].to(self.device)
            of_part = torch.full((len(rows), config.attn_size), torch.nan, dtype=qkv.dtype, device=self.device)
            backend.forward(layer, own, of_part)
            own, of_part = own.cpu(), of_part.cpu()
            out[rows] = of_part
            parts.append((of_part, log_sums_of(own, config.q_size, config.num_heads)))
        out[shared.rows] = shared.merge(parts)
        return out
