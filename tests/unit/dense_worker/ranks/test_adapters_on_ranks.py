"""Each rank has its part of an adapter, and rows with adapters get the logits of a model with these merged in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from services.common.model_config import ModelConfig, load_model_config
from services.common.rank import Rank, seam_config
from services.common.resolve import ResolvedModel
from services.dense_worker.backends import DenseBackend
from services.dense_worker.features.adapters.adapter_loader import adapter_part
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection, WeightFormat
from services.dense_worker.kernels.linear.linear_choice import LinearChoice, LinearKernel
from services.dense_worker.kernels.lora.torch_lora import TorchLora
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.parameters import parts_of_type
from services.dense_worker.ranks.shard_backend import shard_sizes, stage_backend, tensor_backend
from services.dense_worker.ranks.stage_links import StageLinks
from services.dense_worker.ranks.stage_weights import linked_weights
from services.lora.checkpoint import LoraTensors, read_adapter
from services.lora.shapes import adapted_shapes
from tests.support.adapters import make_adapter, merge_adapter
from tests.support.dense.fake_triton_kernels import fake_triton_kernels
from tests.support.dense.steps import relative_error
from tests.support.dense.thread_ranks import ThreadGroup, run_ranks
from tests.support.dense.whole_model import WholeModel
from tests.support.models import make_model_dir
from tests.support.reference import reference_model
from tests.unit.dense_worker.kernels.lora.test_adapters_on_cuda_backend import RowsInTorch

torch.set_num_threads(1)
CPU = torch.device("cpu")
TOLERANCE = 2e-5  # relative to the largest logit, in another order of sums
PROMPTS = torch.randint(3, 96, (3, 13), generator=torch.Generator().manual_seed(5)).tolist()
SLOTS = (1, -1, 0)  # of the prompts' adapters
ADAPTERS: list[dict[str, Any]] = [
    {"rank": 4, "alpha": 8},
    {"rank": 16, "alpha": 4, "modules": ("q_proj", "v_proj", "o_proj", "down_proj"), "ranks": {"o_proj": 5}},
]
# Ranks of tensors, also more of them than heads of keys; ranks that are stages.
ARRANGEMENTS = {"two": (2, False), "four": (4, False), "stages": (2, True)}
MakeBackend = Callable[[ThreadGroup, ModelWeights, Any], DenseBackend]


@dataclass
class Adapted:
    """A model, and the tensors of its adapters."""

    path: Path
    config: ModelConfig
    adapters: list[dict[str, LoraTensors]]
    expected: list[torch.Tensor]  # of each prompt, by transformers with its adapter merged in


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    directory = tmp_path_factory.mktemp("adapted")
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 97}
    path = make_model_dir(directory / "model", "llama", **shape)
    config, models = load_model_config(path), {-1: path}
    adapters = []
    for slot, options in enumerate(ADAPTERS):
        adapter = make_adapter(directory / f"adapter{slot}", path, seed=slot, **options)
        models[slot] = merge_adapter(directory / f"merged{slot}", path, adapter)
        adapters.append(read_adapter(adapter, adapted_shapes(config), 64))
    with torch.inference_mode():
        expected = [
            reference_model(models[slot])(torch.tensor([prompt])).logits[0]
            for slot, prompt in zip(SLOTS, PROMPTS, strict=True)
        ]
    return Adapted(path, config, adapters, expected)


def logits_of_ranks(
    adapted: Adapted, arrangement: str, make_backend: MakeBackend, kind: type[TorchLora] = TorchLora
) -> list[torch.Tensor]:
    """Of all prompts at once, in two chunks."""
    count, are_stages = ARRANGEMENTS[arrangement]

    def run(group: ThreadGroup) -> list[torch.Tensor]:
        made: list[TorchLora] = []

        def make(weights: ModelWeights) -> DenseBackend:
            linears = tuple(parts_of_type(Linear, weights.layers))
            lora = kind(linears, len(adapted.adapters), torch.float32, CPU)
            for slot, tensors in enumerate(adapted.adapters):
                lora.store(slot, adapter_part(tensors, linears, adapted.config.head_dim, group.rank))
            made.append(lora)
            return make_backend(group, weights, lora)

        model = WholeModel(adapted.path, make, rank=group.rank)
        for seq_id, prompt in enumerate(PROMPTS):
            model.open(seq_id, prompt)
        chunks = []
        for first, length in ((0, 8), (8, 5)):
            made[0].begin_step(np.repeat(np.array(SLOTS), length))
            chunks.append(model.step(*((seq_id, length, first) for seq_id in range(len(PROMPTS)))))
        return [torch.cat(each) for each in zip(*chunks, strict=True)]

    return run_ranks(count, run, are_stages=are_stages)[0]


def check(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for own, true in zip(found, expected, strict=True):
        assert relative_error(own, true) < TOLERANCE


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_logits_are_those_of_merged_weights(adapted: Adapted, arrangement: str) -> None:
    def make(group: ThreadGroup, weights: ModelWeights, lora: TorchLora) -> DenseBackend:
        model = ResolvedModel(adapted.config, torch.float32, CPU, 128, rank=group.rank)
        make_backend = stage_backend if group.rank.is_stage else tensor_backend
        backend, operations = make_backend(weights, model, 64, lora)
        operations.use_group(group)
        return backend

    check(logits_of_ranks(adapted, arrangement, make), adapted.expected)


@pytest.mark.parametrize("arrangement", ["two", "stages"])
def test_the_kernels_for_cuda_add_up_the_same(adapted: Adapted, arrangement: str) -> None:
    """With references in place of the kernels."""
    with fake_triton_kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearChoice, "measure", lambda self, linears, *_: self.set_all(linears, LinearKernel.CUBLAS))
        from services.dense_worker.backends.cuda_backend import CudaBackend
        from services.dense_worker.backends.cuda_operations import CudaOperations
        from services.dense_worker.ranks.sharded_cuda_operations import ShardedCudaOperations

        def make(group: ThreadGroup, weights: ModelWeights, lora: Any) -> DenseBackend:
            rank, sizes = group.rank, (64, torch.float32, CPU)
            if rank.is_stage:
                links, config = StageLinks(torch.float32), seam_config(adapted.config, rank)
                operations: Any = CudaOperations(config, *sizes, lora)
                backend = CudaBackend(linked_weights(weights, links), config, 64, lora, operations=operations)
                links.use_group(group)
            else:
                config = shard_sizes(adapted.config, rank)
                operations = ShardedCudaOperations(config, adapted.config.vocab_size, *sizes, lora)
                backend = CudaBackend(weights, config, 64, lora, operations=operations)
                operations.use_group(group)
            return backend

        check(logits_of_ranks(adapted, arrangement, make, RowsInTorch), adapted.expected)


def projection(name: str) -> Projection:
    return Projection(name, 0)


def test_the_parts_of_an_adapter_are_views_of_what_each_rank_multiplies(adapted: Adapted) -> None:
    [whole, _] = adapted.adapters
    name, weight = "model.layers.0.self_attn.", cast(WeightFormat, None)
    layer = [
        Linear("qkv", 64, 0, (projection(f"{name}q_proj"), projection(f"{name}k_proj")), Cut.OUT, weight, None),
        Linear("o", 64, 0, (projection(f"{name}o_proj"),), Cut.IN, weight, None),
    ]
    head_dim = adapted.config.head_dim
    parts = [adapter_part(whole, layer, head_dim, Rank(index, 4)) for index in range(4)]
    q, k, o = ([part[f"{name}{kind}_proj"] for part in parts] for kind in "qko")
    assert np.array_equal(np.concatenate([each.b for each in q]), whole[f"{name}q_proj"].b)
    assert np.array_equal(np.concatenate([each.a for each in o], axis=1), whole[f"{name}o_proj"].a)
    assert [np.array_equal(each.b, whole[f"{name}k_proj"].b[:head_dim]) for each in k] == [True, True, False, False]
    assert all(np.shares_memory(each.a, whole[f"{name}q_proj"].a) for each in q)
