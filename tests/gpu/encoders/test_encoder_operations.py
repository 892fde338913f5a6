"""Encoders of all families with Triton's kernels equal those with torch's operations, in runs of several inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from services.common.config import ModelSection
from services.common.encoders.encoder_config import read_encoder_config
from services.common.pooling.pooling_config import PoolingMethod, read_pooling
from services.dense_worker.encoders.text.encoder_operations import Rotation, TorchEncoderOperations
from services.dense_worker.encoders.text.load_encoder import load_encoder
from services.dense_worker.encoders.text.text_encoder import EncoderRun, TextEncoder
from services.dense_worker.encoders.text.triton_operations import TritonEncoderOperations, turn_heads
from services.dense_worker.kernels.triton_launch import KernelLauncher
from tests.support.encoders import make_encoder
from tests.unit.dense_worker.encoders.text.test_text_encoder import VARIANTS, random_inputs

# Norms of sums, gated MLPs whose inputs are normalised, and norms of heads and of what is added.
FAMILIES = ("bert-tanh", "modernbert", "gemma")
INPUTS = random_inputs((1, 7, 3))


@torch.inference_mode()
def vectors_of(encoder: TextEncoder) -> torch.Tensor:
    run = EncoderRun(encoder, INPUTS, [0] * len(INPUTS))
    while not run.is_done:
        run.advance()
    return run.pool(PoolingMethod.MEAN).cpu()


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_the_same(family: str, kernel_device: torch.device, tmp_path: Path) -> None:
    """In float32, in which they differ by the order of additions."""
    name, fields = VARIANTS[family]
    make_encoder(tmp_path, name, fields | {"num_hidden_layers": 2})
    pooling = read_pooling(ModelSection(path=tmp_path))
    assert pooling is not None
    encoder = load_encoder(tmp_path, read_encoder_config(tmp_path), pooling, torch.float32, kernel_device)
    wanted = vectors_of(replace(encoder, operations=TorchEncoderOperations()))
    found = vectors_of(replace(encoder, operations=TritonEncoderOperations(kernel_device)))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_the_first_heads_are_turned(kernel_device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Also where heads and columns are no powers of 2. Both round once."""
    generator = torch.Generator().manual_seed(8)
    qkv = torch.randn(5, 7 * head_dim, generator=generator).to(kernel_device, dtype)
    angles = torch.randn(5, head_dim // 2, generator=generator).to(kernel_device)
    rotation = Rotation(angles.cos(), angles.sin())
    wanted = TorchEncoderOperations().prepare_heads(qkv, 5, None, rotation)
    turn_heads(KernelLauncher(kernel_device), qkv, 5, rotation)
    torch.testing.assert_close(qkv, wanted, rtol=0, atol=2e-3 if dtype == torch.float16 else 1e-6)
    assert torch.equal(qkv[:, 5 * head_dim :], wanted[:, 5 * head_dim :])
