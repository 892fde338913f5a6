"""Two groups of layers: our kernels give the results of the torch reference, whose layers all have the same blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.cache.cached_sequence import PlannedStep
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.step_metadata import build_step_metadata
from services.attn_worker.layers import BackendSetup
from services.attn_worker.layers.mha.torch_attention import TorchAttention
from services.channel import rows_of_layer
from services.common.attention.learned import Learned
from services.common.kv_cache.scales import KVScales
from services.common.model_config import AttentionOptions, LayerHeads, ModelConfig
from services.step import StepPlan
from tests.gpu.attention_pair import TOLERANCES, Kernels, make_config, relative_error
from tests.support.attention.open_now import open_sequence
from tests.support.plans import make_plan, make_window_group

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 300, 16, 2048
WINDOW, MAX_NUM_SEQS, MAX_STEP_TOKENS = 24, 8, 256
HEADS = LayerHeads(4, 2, 32)
CASES = {
    "plain": AttentionOptions(),
    "learned sinks": AttentionOptions(has_sinks=True),
    "softcap": AttentionOptions(softcap=2.0, scale=0.3),
    "other heads": AttentionOptions(scale=0.2, layer_heads=(HEADS, LayerHeads(4, 1, 64), HEADS, LayerHeads(4, 1, 64))),
    "shared keys": AttentionOptions(scale=0.2, layer_heads=(HEADS, HEADS, replace(HEADS, kv_layer=0), HEADS)),
}


@pytest.fixture
def kernels(kernel_device: torch.device) -> Kernels:
    triton = pytest.importorskip("services.attn_worker.layers.triton_attention", reason="needs triton")
    return Kernels(triton.TritonAttention, kernel_device, torch.float32)


def config_of(case: str) -> ModelConfig:
    config = make_config(4, 2, 32, windows=(WINDOW, None, WINDOW - 7, None))
    return replace(config, attention=CASES[case])


class GroupPair:
    """The kernels with two groups, the reference with one, each with its KV cache; both run the same plans."""

    def __init__(
        self, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, cache_dtype: torch.dtype | None = None
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, kernels.device
        plain = KVCacheSpec.of_model(config, cache_dtype or torch.float32, NUM_BLOCKS, BLOCK_SIZE)
        group = make_window_group(WINDOW, BLOCK_SIZE, MAX_NUM_SEQS, MAX_STEP_TOKENS)
        grouped = replace(plain, dtype=cache_dtype or dtype, window_blocks=group)
        self.cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, window_blocks=group, enable_prefix_cache=False)
        self.reference_cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, enable_prefix_cache=False)
        self.reference = TorchAttention(BackendSetup(config, plain, torch.float32, self.device, MAX_MODEL_LEN))
        sizes = MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_STEP_TOKENS
        self.kernels = kernels.make(BackendSetup(config, grouped, dtype, self.device, *sizes))
        self.generator = torch.Generator().manual_seed(3)
        for backend in (self.reference, self.kernels):
            backend.use_learned(Learned(KVScales.ones(config.num_layers)))
            if config.attention.has_sinks:
                sinks = 3 * torch.randn(config.num_layers, config.num_heads, generator=torch.manual_seed(1))
                backend.use_learned(Learned(sinks=sinks.tolist()))
        self.lengths: dict[int, int] = {}

    def plan(self, num_tokens: dict[int, int], fork: tuple[int, int] | None = None) -> StepPlan:
        """`num_tokens` by seq_id, unknown ones are new; `fork`: (parent, child), at the parent's end."""
        forks = []
        if fork is not None:
            self.lengths[fork[1]] = self.lengths[fork[0]]
            forks = [(*fork, self.lengths[fork[0]])]
        for seq_id, count in num_tokens.items():
            if seq_id not in self.lengths:
                self.lengths[seq_id] = 0
                for cache in (self.cache, self.reference_cache):
                    open_sequence(cache, seq_id, [0] * count, count)
        plan = make_plan([(seq_id, count, self.lengths[seq_id]) for seq_id, count in num_tokens.items()], forks=forks)
        for seq_id, count in num_tokens.items():
            self.lengths[seq_id] += count
        return plan

    def begin(self, plan: StepPlan, padded_num_rows: int | None = None) -> PlannedStep:
        planned, expected = self.cache.plan_step(plan), self.reference_cache.plan_step(plan)
        assert planned.errors == expected.errors == {}
        self.kernels.storage.copy_blocks(planned.block_copies)
        self.reference.storage.copy_blocks(expected.block_copies)
        self.kernels.begin_step(planned.metadata, padded_num_rows)
        self.reference.begin_step(expected.metadata)
        for cache in (self.cache, self.reference_cache):
            cache.commit_step()
        return planned

    def make_qkv(self, num_rows: int) -> torch.Tensor:
        qkv = torch.randn(num_rows, self.config.qkv_size, generator=self.generator)
        return qkv.to(self.dtype).to(self.device)

    def expected(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(qkv), self.config.attn_size, device=self.device)
        self.reference.forward(layer, qkv.float(), out)
        return rows_of_layer(out, self.config.layer_heads[layer].attn_size)

    @torch.inference_mode()
    def check(
        self,
        num_tokens: dict[int, int],
        fork: tuple[int, int] | None = None,
        padded_num_rows: int | None = None,
        tolerance: float | None = None,
    ) -> None:
        num_rows = sum(num_tokens.values())
        self.begin(self.plan(num_tokens, fork), padded_num_rows)
        qkv = self.make_qkv(padded_num_rows or num_rows)
        for layer, heads in enumerate(self.config.layer_heads):
            out = torch.full(
                (len(qkv), self.config.attn_size), float("nan"), dtype=self.dtype, device=self.device
            )
            self.kernels.forward(layer, qkv, out)
            found = rows_of_layer(out, heads.attn_size)[:num_rows]
            error = relative_error(found, self.expected(layer, qkv[:num_rows]))
            assert error < (tolerance or TOLERANCES[self.dtype]), (layer, error)


def check_all_kinds_of_steps(pair: GroupPair, tolerance: float | None = None) -> None:
    """Prompts in chunks, single tokens beside them and alone, a fork; far beyond the windows."""
    for num_tokens in ({1: 90, 2: 5, 3: 80}, {1: 1, 2: 70, 4: 1, 3: 30}, {3: 1, 1: 1, 4: 1, 2: 1}):
        pair.check(num_tokens, tolerance=tolerance)
    pair.check({3: 1, 5: 1, 1: 1}, fork=(3, 5), tolerance=tolerance)
    pair.check({5: 40, 3: 2, 2: 1}, tolerance=tolerance)
    pair.check({5: 1, 3: 1, 1: 1, 4: 1}, padded_num_rows=8, tolerance=tolerance)
    assert pair.cache.pools["windows"].num_used_blocks < pair.cache.num_used_blocks


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_step(kernels: Kernels, case: str) -> None:
    check_all_kinds_of_steps(GroupPair(config_of(case), kernels, kernels.dtype))


def test_8_bits(kernels: Kernels) -> None:
    """Both round to the same 8 bits. Rotated in another order of sums, a few keys fall on the other side of a step."""
    check_all_kinds_of_steps(GroupPair(config_of("plain"), kernels, kernels.dtype, torch.int8), tolerance=2e-3)


@pytest.mark.gpu
def test_one_graph_replays_every_decode_step_of_its_bucket(kernels: Kernels) -> None:
    """Tables of both groups grow and shrink between the replays, behind fixed addresses."""
    pair = GroupPair(config_of("plain"), kernels, torch.bfloat16)
    config, bucket = pair.config, 8
    qkv = torch.zeros(bucket, config.qkv_size, dtype=pair.dtype, device=pair.device)
    outs = torch.empty(config.num_layers, bucket, config.attn_size, dtype=pair.dtype, device=pair.device)
    graph = torch.cuda.CUDAGraph()
    empty = build_step_metadata(*np.zeros((3, 0), np.int64), np.zeros((0, 0), np.int32), BLOCK_SIZE)
    with torch.inference_mode():
        pair.kernels.begin_step(replace(empty, windows=empty), bucket)
        for layer in pair.kernels.layers_to_compile:
            pair.kernels.forward(layer, qkv, outs[layer])
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for layer in range(config.num_layers):
                pair.kernels.forward(layer, qkv, outs[layer])
    for prompts in ({2: 200, 3: 30}, {4: 64, 5: 150, 6: 1}):
        pair.check(prompts)
        for _ in range(20):
            num_seqs = len(pair.lengths)
            with torch.inference_mode():
                qkv.copy_(pair.make_qkv(bucket))
                outs.fill_(float("nan"))
                pair.begin(pair.plan(dict.fromkeys(pair.lengths, 1)), bucket)
                graph.replay()
                for layer in range(config.num_layers):
                    expected = pair.expected(layer, qkv[:num_seqs])
                    assert relative_error(outs[layer, :num_seqs], expected) < TOLERANCES[pair.dtype]
                    assert (outs[layer, num_seqs:] == 0).all()
