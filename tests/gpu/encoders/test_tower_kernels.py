"""The kernels of towers against the operations of torch that they replace, one by one and in whole towers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from services.common.families.shape import Activation
from services.common.quantization.schemes import QuantizationConfig, fp8_towers, on_the_fly_fp8
from services.common.vision.vision_config import VisionConfig, load_vision_config
from services.dense_worker.encoders.packed_attention import PackedSequences
from services.dense_worker.encoders.vision.load import StoredTower
from services.dense_worker.encoders.vision.operations import Rotation, TorchTowerOperations
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.encoders.vision.triton_operations import TritonTowerOperations, rotate
from services.dense_worker.encoders.vision.vision_encoder import VisionEncoder
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Cut, Projection
from services.dense_worker.kernels.norm.norm import LayerNorm, Norm, RmsNorm
from services.dense_worker.kernels.triton_launch import KernelLauncher
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.parameters import Parameter
from tests.support.dense.vision_models import VARIANTS, make_vision_model, noise, run_tower

ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-10}  # of the largest number; float16: one step of rounding


def check(found: torch.Tensor, expected: torch.Tensor, num_roundings: int = 1) -> None:
    bound = num_roundings * ROUNDING[found.dtype] * expected.float().abs().max()
    assert (found.float() - expected.float()).abs().max() <= bound


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(5, 2, 16), (3, 16, 80), (1, 3, 72)])
def test_operations(
    dtype: torch.dtype, num_tokens: int, num_heads: int, head_dim: int, kernel_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(kernel_device, dtype)

    hidden = num_heads * head_dim
    kernels, reference = TritonTowerOperations(kernel_device, dtype), TorchTowerOperations()
    turned = random(num_tokens, 3, num_heads, head_dim)
    rotation = Rotation.of(random(num_tokens, head_dim // 2).float())
    heads = turned.clone()
    rotate(KernelLauncher(kernel_device), turned, rotation)
    for part, expected in enumerate((rotation.apply(heads[:, 0]), rotation.apply(heads[:, 1]), heads[:, 2])):
        check(turned[:, part], expected)
    weight, bias = Parameter("weight", random(hidden)), Parameter("bias", random(hidden))
    norms: list[Norm] = [RmsNorm(weight, 1e-6), LayerNorm(weight, bias, 1e-5)]
    for quantization in (None, on_the_fly_fp8()):
        allocator = WeightAllocator(dtype, kernel_device, quantization)
        linear = allocator.linear("linear", hidden, (Projection("linear", 48),), Cut.OUT, has_bias=True)
        linear.bias.data.copy_(random(48))
        if quantization is None:
            linear.weight.matrix.data.copy_(random(48, hidden))
        else:
            linear.weight.fill_random(1.0, torch.Generator(kernel_device).manual_seed(1))
        x, delta = random(num_tokens, hidden), random(num_tokens, hidden)
        check(kernels.multiply(linear, x), reference.multiply(linear, x))
        for norm in norms:
            check(kernels.multiply(linear, x, norm=norm), reference.multiply(linear, x, norm=norm))
            expected_pair = reference.add_multiply(linear, x, delta, norm)
            for found, expected in zip(
                kernels.add_multiply(linear, x.clone(), delta.clone(), norm), expected_pair, strict=True
            ):
                check(found, expected)
        for function in (Activation.SILU, Activation.GELU, Activation.GELU_TANH, Activation.QUICK_GELU):
            for is_gated in (False, True):
                activation, inner = MlpActivation(function, is_gated), random(num_tokens, (1 + is_gated) * hidden)
                found = kernels.multiply(linear, inner, activation=activation)
                check(found, reference.multiply(linear, inner, activation=activation), num_roundings=8)  # of terms


@pytest.mark.parametrize("num_heads, head_dim", [(2, 16), (3, 80), (1, 72)])
def test_short_sequences_are_turned_and_attended_to(
    num_heads: int, head_dim: int, kernel_device: torch.device
) -> None:
    lengths, generator = [16, 4, 64, 1, 33], torch.Generator().manual_seed(1)
    num_tokens = sum(lengths)
    heads = torch.randn(num_tokens + 7, 3, num_heads, head_dim, generator=generator).to(kernel_device, torch.float16)
    angles = torch.randn(num_tokens + 7, head_dim // 2, generator=generator).to(kernel_device)
    rotation = Rotation.of(angles)
    ends = torch.tensor([0, *lengths[:2], 0, *lengths[2:], 0, 0]).cumsum(0).to(kernel_device, torch.int32)  # some empty
    padded = PackedSequences.in_place(ends, num_tokens + 7, 64)
    found = TritonTowerOperations(kernel_device, torch.float16).attend(heads.clone(), padded, rotation)[:num_tokens]
    expected = TorchTowerOperations().attend(
        heads[:num_tokens].float(),
        PackedSequences(lengths, kernel_device),
        Rotation(rotation.cos[:num_tokens], rotation.sin[:num_tokens]),
    )
    assert (found.float() - expected).abs().max() <= 2**-8 * expected.abs().max(), "q, k, weights and sums are rounded"


@pytest.mark.parametrize("head_dim", [72, 80])
def test_long_sequences_are_attended_to_in_two_products(head_dim: int, kernel_device: torch.device) -> None:
    lengths, num_heads, generator = [130, 64, 7, 1, 200], 2, torch.Generator().manual_seed(1)
    num_tokens = sum(lengths)
    heads = torch.randn(num_tokens + 7, 3, num_heads, head_dim, generator=generator).to(kernel_device, torch.float16)
    ends = torch.tensor([0, *lengths[:2], 0, *lengths[2:], 0]).cumsum(0).to(kernel_device, torch.int32)  # some empty
    padded = PackedSequences.in_place(ends, num_tokens + 7, 300)
    found = TritonTowerOperations(kernel_device, torch.float16).attend(heads, padded, None)[:num_tokens]
    in_float32 = heads[:num_tokens].float()
    expected = TorchTowerOperations().attend(in_float32, PackedSequences(lengths, kernel_device), None)
    assert (found.float() - expected).abs().max() <= 2**-9 * expected.abs().max(), "weights and sums are rounded"


def pictures_of(vision: VisionConfig) -> list[Picture]:
    """Two of different sizes."""
    pictures = []
    for name, image in (("a", noise(30, 43, 1)), ("b", noise(60, 20, 2))):
        shape = vision.layout.shape_of(image.height, image.width, is_low=False)
        tiles = np.stack([np.asarray(tile) for tile in vision.layout.tiles_of(image, shape)])
        pictures.append(Picture(name, shape, torch.from_numpy(tiles)))
    return pictures


@pytest.mark.parametrize("variant", VARIANTS)
def test_towers(variant: str, tmp_path: Path, kernel_device: torch.device) -> None:
    path = make_vision_model(tmp_path, variant)
    vision = load_vision_config(path)
    assert vision is not None
    tower = StoredTower(vision, path, torch.float32, kernel_device, None).load().tower
    pictures = pictures_of(vision)
    operations = TritonTowerOperations(kernel_device, torch.float32)
    found = run_tower(tower, pictures, vision.pixels, operations)
    if kernel_device.type == "cuda":  # streams wait for the host
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_tower(tower, pictures, vision.pixels, operations)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for each, expected in zip(found, run_tower(tower, pictures, vision.pixels), strict=True):
        check(each, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, fp8_towers()], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("variant", ["qwen2_5_vl", "qwen3_vl"])
def test_captured_towers(
    variant: str, quantization: QuantizationConfig | None, tmp_path: Path, kernel_device: torch.device
) -> None:
    path = make_vision_model(tmp_path, variant)
    vision = load_vision_config(path)
    assert vision is not None
    tower = StoredTower(vision, path, torch.bfloat16, kernel_device, None, quantization).load().tower
    pictures = pictures_of(vision)
    expected = run_tower(tower, pictures, vision.pixels, TritonTowerOperations(kernel_device, torch.bfloat16))
    encoder = VisionEncoder(tower, vision.pixels, torch.bfloat16, kernel_device, max_rows=4096)
    for is_captured in (False, True):
        if is_captured:  # streams wait for the host
            torch.cuda.set_sync_debug_mode("error")
        try:
            found = encoder.begin(pictures).advance()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert found is not None
        for each, rows in zip(found, expected, strict=True):
            # Other numbers of rows may have other kernels, which round at other places.
            assert (each.on_stream().float() - rows.float()).abs().max() <= 2**-5 * rows.float().abs().max()
