"""The kernel of quantized experts against each format's reference, a loop over experts on a CPU in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.common.families.shape import Activation, ClampedSwiglu, ExpertOptions
from services.common.quantization.schemes import (
    Activations,
    BlockFp8Scheme,
    Element,
    GroupedIntScheme,
    Mxfp4Scheme,
    Packing,
    QuantizationConfig,
    ScaledScheme,
    Scheme,
    SchemeGroup,
)
from services.dense_worker.kernels.experts.routed_experts import RoutedExperts
from services.dense_worker.kernels.experts.router import SoftmaxRouter
from services.dense_worker.kernels.linear.linear import Projection
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.parameters import Parameter, tensors_by_name, with_tensors
from tests.support.model_configs import small_config

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.kernels.experts.cuda_experts import CudaExperts
from services.dense_worker.kernels.triton_launch import KernelLauncher

CPU = torch.device("cpu")
HOPPER_SHARED_BYTES = 227 << 10
# ‖out − reference‖ / ‖reference‖: the activation, the products of experts and the sum are rounded.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
# An activation that lies between two codes may become either. The interpreter cuts e4m3 off, see the other formats.
OTHER_CODE, CUT_OFF = 3e-2, 0.2
SIZES = {"hidden": 256, "intermediate": 128}
SCHEMES: dict[str, Scheme] = {
    "fp8 channel, token": ScaledScheme(Element.FP8, True, Activations.TOKEN),
    "fp8 tensor, weight only": ScaledScheme(Element.FP8, False, Activations.NONE),
    "int8 channel, token": ScaledScheme(Element.INT8, True, Activations.TOKEN),
    "fp8 blocks": BlockFp8Scheme((128, 128)),
    "int4 g32": GroupedIntScheme(Packing.COMPRESSED_TENSORS, 4, 32, True, False),
    "int4 g128 with zeros": GroupedIntScheme(Packing.AWQ, 4, 128, False, False),
    "int8 g64": GroupedIntScheme(Packing.GPTQ, 8, 64, True, False),
    "mxfp4": Mxfp4Scheme(is_compressed_tensors=False),
}


def make_experts(scheme: Scheme, options: ExpertOptions, dtype: torch.dtype, is_gpt_oss: bool) -> RoutedExperts:
    """On the CPU; as in gpt-oss with biases and a clamped SwiGLU."""
    hidden, size = SIZES["hidden"], options.intermediate_size
    generator = torch.Generator().manual_seed(0)
    allocator = WeightAllocator(dtype, CPU, QuantizationConfig("test", (SchemeGroup(("Linear",), scheme),), ()))
    ups = tuple(Projection(f"{i}.{part}", size) for i in range(options.num_experts) for part in ("gate", "up"))
    downs = tuple(Projection(f"{i}.down", hidden) for i in range(options.num_experts))
    gate_up = allocator.experts("up", options.num_experts, hidden, ups, is_gpt_oss)
    down = allocator.experts("down", options.num_experts, size, downs, is_gpt_oss)
    for linear in (gate_up, down):
        linear.weight.fill_random(linear.in_features**-0.5, generator)
        for parameter in tensors_by_name(linear.weight).items():
            if parameter[0].endswith("_scale") and parameter[1].is_floating_point():
                parameter[1].mul_(0.5 + torch.rand(parameter[1].shape, generator=generator).to(parameter[1].dtype))
        if linear.bias is not None:
            linear.bias.data.normal_(generator=generator)
    weight = Parameter("router", (torch.randn(options.num_experts, hidden, generator=generator) / 8).to(dtype))
    clamped = ClampedSwiglu(1.702, 2.0) if is_gpt_oss else None
    router = SoftmaxRouter(weight, options.num_per_token, True)
    return RoutedExperts(router, gate_up, down, Activation.SILU, clamped)


class ChosenRouter:
    """Chooses what it was told, so that the reference multiplies with the kernels' choice."""

    def __init__(self, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        self.num_per_token, self._chosen, self._weights = chosen.shape[1], chosen, weights

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._chosen, self._weights


@pytest.mark.parametrize("is_gpt_oss", [False, True], ids=["plain", "gpt-oss"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_quantized_experts_are_those_of_the_reference(
    kernel_device: torch.device, name: str, dtype: torch.dtype, is_gpt_oss: bool
) -> None:
    if kernel_device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter does not round bfloat16")
    if kernel_device.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the kernels of quantized layers need compute capability 9.0")
    options = ExpertOptions(6, 2, SIZES["intermediate"], True, (0,))
    reference = make_experts(SCHEMES[name], options, dtype, is_gpt_oss)
    moved = {key: tensor.to(kernel_device) for key, tensor in tensors_by_name(reference).items()}
    wide = {key: tensor.float() if "bias" in key else tensor for key, tensor in tensors_by_name(reference).items()}
    launcher = KernelLauncher(kernel_device)
    if kernel_device.type == "cpu":
        launcher.shared_memory_bytes = HOPPER_SHARED_BYTES
    config = replace(small_config("llama"), hidden_size=SIZES["hidden"])
    kernels = CudaExperts(launcher, config, options, 300, dtype, kernel_device)
    for num_tokens in (1, 3, 40, 300) if kernel_device.type == "cuda" else (1, 9):
        x = torch.randn(num_tokens, SIZES["hidden"], generator=torch.Generator().manual_seed(num_tokens)).to(dtype)
        kernels.set_num_tokens(num_tokens)
        found = kernels.mix(x.to(kernel_device), with_tensors(reference, moved), None).cpu().float()
        router = ChosenRouter(kernels._chosen[:num_tokens].cpu().long(), kernels._weights[:num_tokens].cpu())
        expected = replace(with_tensors(reference, wide), router=router).mix(x.float())
        tolerance = TOLERANCES[dtype]
        if "token" in name or "blocks" in name:
            tolerance = CUT_OFF if kernel_device.type == "cpu" and "fp8" in name else OTHER_CODE
        assert (found - expected).norm() < tolerance * expected.norm(), num_tokens
