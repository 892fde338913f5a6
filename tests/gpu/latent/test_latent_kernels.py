"""The kernels of latent attention give the results of the float32 torch reference, for every kind of step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.attn_worker.cache.step_metadata import build_step_metadata
from services.common.model_config import AttentionOptions, ModelConfig, RopeConfig
from services.dense_worker.kernels.norm.norm import RmsNorm
from services.dense_worker.model.torch_operations import TorchOperations
from services.dense_worker.parameters import Parameter
from tests.gpu.attention_pair import (
    MAX_MODEL_LEN,
    TOLERANCES,
    Kernels,
    Pair,
    check_all_kinds_of_steps,
    make_config,
    relative_error,
)

DEEPSEEK = (64, 512)  # rotated and latent dimensions of all published models
YARN = RopeConfig(
    "yarn", 10000.0, 8, 256, factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.7
)


def latent_config(
    num_heads: int,
    rotated_dim: int = 8,
    rank: int = 32,
    rope: RopeConfig | None = None,
    num_layers: int = 1,
    rotates_pairs: bool = True,
) -> ModelConfig:
    rope = rope or RopeConfig("default", 10000.0, rotated_dim, MAX_MODEL_LEN)
    config = make_config(num_heads, 1, rotated_dim + rank, windows=(None,) * num_layers, rope=rope)
    options = AttentionOptions(scale=(rotated_dim + rank) ** -0.5, rotates_pairs=rotates_pairs, value_dim=rank)
    return replace(config, attention=options)


@pytest.fixture
def kernels(kernel_device: torch.device) -> Kernels:
    triton = pytest.importorskip("services.attn_worker.layers.triton_attention", reason="needs triton")
    return Kernels(triton.TritonAttention, kernel_device, torch.float32)


@pytest.mark.parametrize(
    ("num_heads", "dtype"), [*((16, dtype) for dtype in TOLERANCES), (20, torch.bfloat16), (128, torch.bfloat16)]
)
def test_the_published_sizes(kernels: Kernels, dtype: torch.dtype, num_heads: int) -> None:
    check_all_kinds_of_steps(Pair(latent_config(num_heads, *DEEPSEEK), kernels, dtype))


@pytest.mark.parametrize(("num_heads", "rotated_dim", "rank"), [(1, 8, 16), (3, 2, 7), (40, 32, 256), (72, 40, 80)])
def test_other_sizes(kernels: Kernels, num_heads: int, rotated_dim: int, rank: int) -> None:
    check_all_kinds_of_steps(Pair(latent_config(num_heads, rotated_dim, rank), kernels))


@pytest.mark.parametrize("num_heads", [3, 40, 72])
def test_other_sizes_in_16_bits(kernels: Kernels, num_heads: int) -> None:
    check_all_kinds_of_steps(Pair(latent_config(num_heads, 24, 80), kernels, torch.float16))


@pytest.mark.parametrize("block_size", [1, 12, 32, 64])
def test_every_block_size(kernels: Kernels, block_size: int) -> None:
    check_all_kinds_of_steps(Pair(latent_config(4), kernels, block_size=block_size))


@pytest.mark.parametrize(
    "config",
    [
        latent_config(4, rotates_pairs=False),
        latent_config(4, rope=YARN, num_layers=2),
        latent_config(4, rope=RopeConfig("dynamic", 10000.0, 8, 12, factor=2.0)),
    ],
    ids=["halves", "yarn", "dynamic"],
)
def test_every_rotation(kernels: Kernels, config: ModelConfig) -> None:
    check_all_kinds_of_steps(Pair(config, kernels))


@pytest.mark.parametrize("num_heads", [4, 80])
def test_long_contexts_are_split_and_merged(kernels: Kernels, num_heads: int) -> None:
    pair = Pair(latent_config(num_heads), kernels)
    pair.check({"long": 700, "short": 5})
    for _ in range(2):
        pair.check({"long": 1, "short": 1})
    pair.check({"long": 1, "short": 3})


def test_padding_rows_become_zero(kernels: Kernels) -> None:
    pair = Pair(latent_config(4), kernels)
    pair.check({"a": 30, "b": 5})
    [(out, expected)] = pair.run(pair.plan({"a": 1, "b": 1}), padded_num_rows=8)
    assert relative_error(out[:2], expected) < kernels.tolerance
    assert not out[2:].any()


def test_nan_stays_in_its_sequence(kernels: Kernels) -> None:
    pair = Pair(latent_config(4), kernels)
    step = pair.plan({"a": 20, "b": 9, "c": 40})
    qkv = pair.make_qkv(69)
    qkv[20:29] = float("nan")
    [(out, expected)] = pair.run(step, qkv)
    is_other = np.r_[0:20, 29:69]
    assert relative_error(out[is_other], expected[is_other]) < kernels.tolerance
    blocks = pair.sequences.pop("b").blocks
    pair.free_blocks += blocks
    pair.check({"a": 1, "d": 7, "c": 1})
    pair.check({"a": 1, "d": 1, "c": 1})


def test_a_forked_sequence_goes_on_in_a_copy_of_the_last_block(kernels: Kernels) -> None:
    pair = Pair(latent_config(4, num_layers=2), kernels)
    pair.check({"a": 21})
    source, copy = pair.sequences["a"].blocks[-1], pair.free_blocks.pop()
    for backend in (pair.reference, pair.kernels):
        backend.storage.copy_blocks([[(source, copy)]])
    pair.sequences["b"] = replace(pair.sequences["a"], blocks=[*pair.sequences["a"].blocks[:-1], copy])
    pair.check({"a": 1, "b": 1})
    pair.check({"a": 1, "b": 4})


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 80])
def test_one_graph_replays_every_decode_step_of_its_bucket(kernels: Kernels, num_heads: int) -> None:
    pair = Pair(latent_config(num_heads, num_layers=2), kernels, torch.bfloat16)
    config, backend, device, bucket = pair.config, pair.kernels, pair.device, 8
    qkv = torch.zeros(bucket, config.qkv_size, dtype=torch.bfloat16, device=device)
    outs = torch.empty(2, bucket, config.attn_size, dtype=torch.bfloat16, device=device)
    empty = build_step_metadata(*np.zeros((3, 0), np.int64), np.zeros((0, 0), np.int32), pair.block_size)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        backend.begin_step(empty, padded_num_rows=bucket)
        backend.forward(0, qkv, outs[0])
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for layer in range(2):
                backend.forward(layer, qkv, outs[layer])
    for prompts in ({"a": 700, "b": 3}, {"c": 64, "d": 1000, "e": 1}):
        pair.check(prompts)
        for _ in range(3):
            step = pair.plan(dict.fromkeys(pair.sequences, 1))
            num_seqs = len(step.num_tokens)
            with torch.inference_mode():
                qkv.copy_(pair.make_qkv(bucket))
                outs.fill_(float("nan"))
                backend.begin_step(step, padded_num_rows=bucket)
                graph.replay()
                pair.reference.begin_step(step)
                for layer in range(2):
                    expected = torch.empty(num_seqs, config.attn_size, device=device)
                    pair.reference.forward(layer, qkv[:num_seqs].float(), expected)
                    assert relative_error(outs[layer, :num_seqs], expected) < TOLERANCES[torch.bfloat16]
                    assert (outs[layer, num_seqs:] == 0).all()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_heads", "plain_dim", "rotated_dim", "rank"), [(16, 128, 64, 512), (20, 10, 6, 24)])
def test_rotated_parts_and_latent_vectors_are_those_of_torch(
    kernel_device: torch.device, dtype: torch.dtype, num_heads: int, plain_dim: int, rotated_dim: int, rank: int
) -> None:
    """Everything around them stays as it is."""
    if kernel_device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter does not round bfloat16")
    triton_latent = pytest.importorskip("services.dense_worker.kernels.norm.triton_latent", reason="needs triton")
    from services.dense_worker.kernels.triton_launch import KernelLauncher

    query_size = num_heads * (plain_dim + rotated_dim)
    norm = RmsNorm(Parameter("norm", torch.randn(rank).to(dtype)), 1e-6)
    down = torch.randn(3, query_size + rank + rotated_dim).to(dtype)
    expected = torch.randn(3, (num_heads + 1) * (rotated_dim + rank)).to(dtype)
    found = expected.clone().to(kernel_device)

    def parts(out: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key = rows.split([query_size, rank + rotated_dim], dim=1)
        return out.unflatten(1, (num_heads + 1, -1)), query.unflatten(1, (num_heads, -1)), key

    TorchOperations().place_latent(*parts(expected, down), norm)
    on_device = parts(found, down.to(kernel_device))
    weight = norm.weight.data.to(kernel_device)
    triton_latent.place_latent(KernelLauncher(kernel_device), *on_device, weight, norm.eps)
    found = found.cpu()
    is_latent = torch.zeros(num_heads + 1, rotated_dim + rank, dtype=torch.bool)
    is_latent[-1, rotated_dim:] = True
    is_latent = is_latent.flatten()
    assert torch.equal(found[:, ~is_latent], expected[:, ~is_latent])
    assert relative_error(found[:, is_latent], expected[:, is_latent]) < TOLERANCES[dtype]
