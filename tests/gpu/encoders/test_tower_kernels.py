"""The kernels of towers against the operations of torch that they replace, one by one and in whole towers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from services.common.families.shape import Activation
from services.common.vision.vision_config import load_vision_config
from services.dense_worker.encoders.vision.load import StoredTower
from services.dense_worker.encoders.vision.operations import Rotation, TorchTowerOperations
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.encoders.vision.triton_operations import TritonTowerOperations
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.norm.norm import LayerNorm, Norm, RmsNorm
from services.dense_worker.parameters import Parameter
from tests.support.dense.vision_models import VARIANTS, make_vision_model, noise, run_tower

ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-10}  # of the largest number; float16: one step of rounding


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.float() - expected.float()).abs().max() <= ROUNDING[found.dtype] * expected.float().abs().max()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(5, 2, 16), (3, 16, 80), (1, 3, 72)])
def test_operations(
    dtype: torch.dtype, num_tokens: int, num_heads: int, head_dim: int, kernel_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(kernel_device, dtype)

    hidden = num_heads * head_dim
    kernels, reference = TritonTowerOperations(kernel_device), TorchTowerOperations()
    heads, angles = random(num_tokens, 3, num_heads, head_dim), random(num_tokens, head_dim // 2).float()
    rotation = Rotation.of(angles)
    for found, expected in zip(
        kernels.rotate(heads.clone(), rotation), reference.rotate(heads, rotation), strict=True
    ):
        check(found, expected)
    weight, bias = Parameter("weight", random(hidden)), Parameter("bias", random(hidden))
    norms: list[Norm] = [RmsNorm(weight, 1e-6), LayerNorm(weight, bias, 1e-5)]
    for norm in norms:
        x, delta = random(num_tokens, hidden), random(num_tokens, hidden)
        check(kernels.norm(x, norm), reference.norm(x, norm))
        for found, expected in zip(
            kernels.add_norm(x.clone(), delta.clone(), norm), reference.add_norm(x, delta, norm), strict=True
        ):
            check(found, expected)
    for function in (Activation.SILU, Activation.GELU, Activation.GELU_TANH, Activation.QUICK_GELU):
        for is_gated in (False, True):
            activation, inner = MlpActivation(function, is_gated), random(num_tokens, 2 * hidden)
            check(kernels.activate(inner, activation), reference.activate(inner, activation))


@pytest.mark.parametrize("variant", VARIANTS)
def test_towers(variant: str, tmp_path: Path, kernel_device: torch.device) -> None:
    path = make_vision_model(tmp_path, variant)
    vision = load_vision_config(path)
    assert vision is not None
    tower = StoredTower(vision, path, torch.float32, kernel_device, None).load().tower
    pictures = []
    for name, image in (("a", noise(30, 43, 1)), ("b", noise(60, 20, 2))):
        shape = vision.layout.shape_of(image.height, image.width, is_low=False)
        tiles = np.stack([np.asarray(tile) for tile in vision.layout.tiles_of(image, shape)])
        pictures.append(Picture(name, shape, torch.from_numpy(tiles)))
    operations = TritonTowerOperations(kernel_device)
    found = run_tower(tower, pictures, vision.pixels, operations)
    if kernel_device.type == "cuda":  # streams wait for the host
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_tower(tower, pictures, vision.pixels, operations)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for each, expected in zip(found, run_tower(tower, pictures, vision.pixels), strict=True):
        check(each, expected)
