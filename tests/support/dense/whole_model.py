"""`WholeModel`: both workers' parts in one process, without channel and scheduler: the test plans each step itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from services.attn_worker.backends.torch_attention import TorchAttention
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.cache.spec import KVCacheSpec
from services.common.attention.rope import length_dependent_beyond
from services.common.model_config import load_model_config
from services.dense_worker.backends import DenseBackend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.attention_sinks import load_sinks
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import load_weights
from services.dense_worker.prompts.given_rows import GivenRowsOfStep
from services.dense_worker.prompts.loaded_table import LoadedTable
from tests.support.plans import make_plan

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 4, 64


class WholeModel:
    """A model of a directory in float32: `KVCache`, `TorchAttention` and a dense backend, on the CPU."""

    def __init__(
        self, path: Path, make_dense: Callable[[ModelWeights], DenseBackend] = TorchBackend, max_model_len: int = 128
    ) -> None:
        self.config = load_model_config(path)
        self.weights = load_weights(path, self.config, torch.float32, CPU)
        self.dense = make_dense(self.weights)
        beyond = length_dependent_beyond(self.config.rope)
        self.cache = KVCache(NUM_BLOCKS, BLOCK_SIZE, max_model_len, length_dependent_beyond=beyond)
        spec = KVCacheSpec.of_model(self.config, torch.float32, NUM_BLOCKS, BLOCK_SIZE)
        self.attention = TorchAttention(self.config, spec, torch.float32, CPU, max_model_len)
        if sinks := load_sinks(path, self.config):
            self.attention.use_sinks(sinks)
        self._token_ids: dict[int, list[int]] = {}
        self._tables: dict[int, LoadedTable] = {}

    def open(self, seq_id: int, prompt: list[int], table: LoadedTable | None = None) -> int:
        """Opens a sequence; returns the number of its tokens that lie in the prefix cache."""
        self._token_ids[seq_id] = list(prompt)
        if table is not None:
            self._tables[seq_id] = table
        return self.cache.open_sequence(seq_id, prompt, len(prompt)).num_cached_tokens

    @torch.inference_mode()
    def step(
        self, *entries: tuple[int, int, int], confirmed: Iterable[tuple[int, int]] = ()
    ) -> tuple[torch.Tensor, ...]:
        """Runs (seq_id, num_tokens, position) as one batch; returns each entry's logits, [num_tokens, vocab_size]."""
        for seq_id, token_id in confirmed:
            self._token_ids[seq_id].append(token_id)
        plan = make_plan(entries, confirmed=confirmed)
        planned = self.cache.plan_step(plan)
        assert planned.errors == {}
        token_ids: list[int] = []
        given = GivenRowsOfStep()
        for seq_id, num_tokens, position in entries:
            known = self._token_ids[seq_id][position : position + num_tokens]
            if seq_id in self._tables:
                known = given.take(self._tables[seq_id], known, len(token_ids))
            token_ids += known
        self.dense.begin_step(plan, len(token_ids))
        self.attention.copy_blocks(planned.block_copies)
        self.attention.begin_step(planned.metadata)
        qkv = torch.empty(len(token_ids), self.config.qkv_size)
        attn_out = torch.empty(len(token_ids), self.config.attn_size)
        residual = self.dense.first(torch.tensor(token_ids), qkv, given.gather())
        for layer in range(self.config.num_layers):
            self.attention.forward(layer, qkv, attn_out)
            if layer + 1 < self.config.num_layers:
                residual = self.dense.middle(layer, attn_out, residual, qkv)
        logits = self.dense.last(attn_out, residual, torch.arange(len(token_ids)))
        self.cache.commit_step()
        return logits.split([num_tokens for _, num_tokens, _ in entries])
