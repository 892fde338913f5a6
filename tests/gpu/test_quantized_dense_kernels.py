"""The kernels of quantized layers, each against the format's reference in float32, which rounds nothing but codes."""

from __future__ import annotations

import pytest
import torch

from services.common.families.shape import Activation
from services.common.quantization.schemes import Activations, Element
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.quantized.activations import rounded_by_groups, to_codes, token_scale
from services.dense_worker.kernels.norm.norm import RmsNorm
from services.dense_worker.parameters import Parameter
from tests.support.quantized.random_weights import KINDS, RandomWeights, in_float32, linear_of

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.backends.cuda_linear import CudaLinear
from services.dense_worker.kernels.linear.linear_choice import LinearKernel
from services.dense_worker.kernels.linear.quantized.operands import InputForm
from services.dense_worker.kernels.linear.quantized.triton_prepare import prepare_input
from services.dense_worker.kernels.linear.triton_tiles import MAX_ROWS
from services.dense_worker.kernels.tensor_map import num_rows_there
from services.dense_worker.kernels.triton_launch import KernelLauncher

FP8, INT8 = Element.FP8, Element.INT8
EPS = 1e-5
# ‖out − reference‖ / ‖reference‖. Numbers are rounded to 2^-9 or 2^-12, at most four times in a row.
TOLERANCES = {torch.bfloat16: 6e-3, torch.float16: 8e-4}
# Where inputs are quantized, one that lies between two codes may become the other: by the rounding of a norm before.
# Triton's interpreter, moreover, cuts e4m3 off: the last bit is 2^-3 of a number.
OTHER_CODE, CUT_OFF = 1e-2, 0.13
# A single row of INT4: sums of four products in float16 are rounded to 2^-12, of codes before their zero point is
# subtracted, which are twice as large as after it; both those of the gate and of what it multiplies.
PAIRED_CODES = 1.2e-3
HOPPER_SHARED_BYTES = 227 << 10
ACTIVATIONS = [MlpActivation(Activation.SILU, True), MlpActivation(Activation.GELU_TANH, True)]
ACTIVATIONS += [MlpActivation(Activation.GELU, False), MlpActivation(Activation.RELU, False)]


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request: pytest.FixtureRequest, kernel_device: torch.device) -> torch.dtype:
    if kernel_device.type == "cpu" and request.param == torch.bfloat16:
        pytest.skip("Triton's interpreter does not round bfloat16")
    return request.param


@pytest.fixture
def launcher(kernel_device: torch.device) -> KernelLauncher:
    launcher = KernelLauncher(kernel_device)
    if kernel_device.type == "cpu":
        launcher.shared_memory_bytes = HOPPER_SHARED_BYTES
    elif torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the kernels of quantized layers need compute capability 9.0")
    return launcher


# (rows of each projection, in_features): split along in_features, three projections, remainders in both.
PARTS = [((192,), 576), ((128, 128, 40), 320), ((130,), 192)]


def check(
    found: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    is_quantized: bool,
    is_fp8: bool,
    least: float = 0.0,  # tolerance
) -> None:
    tolerance = max(TOLERANCES[dtype], least)
    if is_quantized:
        tolerance = CUT_OFF if is_fp8 and found.device.type == "cpu" else OTHER_CODE
    error = ((found.double() - expected.double()).norm() / expected.double().norm()).item()
    assert error < tolerance, error


@pytest.mark.parametrize("num_rows", [1, 5, 64])
@pytest.mark.parametrize(("parts", "width"), PARTS)
@pytest.mark.parametrize("name", KINDS)
def test_streaming_kernels_multiply_as_the_reference(
    launcher: KernelLauncher,
    kernel_device: torch.device,
    dtype: torch.dtype,
    name: str,
    parts: tuple[int, ...],
    width: int,
    num_rows: int,
) -> None:
    make, is_quantized = KINDS[name]
    weights = RandomWeights(kernel_device, dtype)
    products = CudaLinear(launcher, kernel_device, dtype)
    size = sum(parts)
    linear = linear_of(make(weights, parts, width), parts, width, weights.randn(size))
    assert products.can_stream(linear)
    is_fp8 = name.startswith("fp8")

    # As in the backend, the input and the result lie in wider workspaces.
    x = weights.randn(num_rows, 2 * width)[:, :width]
    workspace = torch.full((num_rows + 1, size + 8), torch.nan, dtype=dtype, device=kernel_device)
    out = workspace[:num_rows, :size]
    products.multiply(LinearKernel.STREAMED, linear, x, out)
    check(out, in_float32(linear, x), dtype, is_quantized, is_fp8)
    assert workspace[num_rows:].isnan().all() and workspace[:, size:].isnan().all()

    residual = weights.randn(num_rows, size)
    expected = in_float32(linear, x) + residual.float()
    products.multiply(LinearKernel.STREAMED, linear, x, residual, residual=residual)
    check(residual, expected, dtype, is_quantized, is_fp8)

    wide = torch.full((num_rows, size), torch.nan, device=kernel_device)
    products.multiply(LinearKernel.STREAMED, linear, x, wide)
    check(wide, in_float32(linear, x), dtype, is_quantized, is_fp8)
    assert torch.equal(wide, wide.to(dtype).float())


@pytest.mark.parametrize("num_rows", [1, 23])
@pytest.mark.parametrize("name", KINDS)
def test_streaming_kernels_fuse_an_activation_and_for_one_row_a_norm(
    launcher: KernelLauncher, kernel_device: torch.device, dtype: torch.dtype, name: str, num_rows: int
) -> None:
    make, is_quantized = KINDS[name]
    weights = RandomWeights(kernel_device, dtype)
    products = CudaLinear(launcher, kernel_device, dtype)
    parts, width = (128, 128), 192
    linear = linear_of(make(weights, parts, width), parts, width, weights.randn(256))
    x, gain = weights.randn(num_rows, width), 1 + 0.2 * weights.randn(width)
    norm = RmsNorm(Parameter("norm", gain, ()), EPS) if num_rows == 1 else None
    normed = x if norm is None else norm.normalize(x)
    least = PAIRED_CODES if name.startswith("int4") and num_rows == 1 else 0.0
    for activation in ACTIVATIONS:
        out = torch.full((num_rows, 128 if activation.is_gated else 256), torch.nan, dtype=dtype, device=kernel_device)
        products.multiply(LinearKernel.STREAMED, linear, x, out, norm=norm, activation=activation)
        expected = activation.apply(in_float32(linear, normed))
        check(out, expected, dtype, is_quantized, name.startswith("fp8"), least)


@pytest.mark.parametrize("width", [4096, 5120, 8192, 11008, 13824, 28672])
@pytest.mark.parametrize("name", ["fp8 token", "int8 static", "int4 g32", "int4 g64 zero"])
def test_tiles_of_real_widths_multiply_a_row_as_the_reference(
    launcher: KernelLauncher, kernel_device: torch.device, dtype: torch.dtype, name: str, width: int
) -> None:
    """The tiles depend on the width. An odd number of rows leaves the last tile of a program incomplete."""
    make, is_quantized = KINDS[name]
    weights = RandomWeights(kernel_device, dtype)
    parts, is_fp8 = (90,), name.startswith("fp8")
    linear = linear_of(make(weights, parts, width), parts, width, None)
    x, residual = weights.randn(1, width), weights.randn(1, 90)
    expected = in_float32(linear, x) + residual.float()
    products = CudaLinear(launcher, kernel_device, dtype)
    products.multiply(LinearKernel.STREAMED, linear, x, residual, residual=residual)
    check(residual, expected, dtype, is_quantized, is_fp8)
    gated = linear_of(make(weights, parts, width), parts, width, None)
    out = torch.full((1, 45), torch.nan, dtype=dtype, device=kernel_device)
    products.multiply(LinearKernel.STREAMED, gated, x, out, activation=ACTIVATIONS[0])
    least = PAIRED_CODES if name.startswith("int4") else 0.0
    check(out, ACTIVATIONS[0].apply(in_float32(gated, x)), dtype, is_quantized, is_fp8, least)


@pytest.mark.parametrize("num_rows", [1, 30, 70])
@pytest.mark.parametrize("activations", [Activations.TOKEN, Activations.STATIC])
@pytest.mark.parametrize("element", Element)
@pytest.mark.parametrize("parts", [(96,), (64, 16, 32)])
def test_products_of_codes_are_those_of_the_reference(
    launcher: KernelLauncher,
    kernel_device: torch.device,
    dtype: torch.dtype,
    element: Element,
    activations: Activations,
    parts: tuple[int, ...],
    num_rows: int,
) -> None:
    weights, width, size = RandomWeights(kernel_device, dtype), 144, sum(parts)
    linear = linear_of(weights.scaled(element, activations, parts, width), parts, width, weights.randn(size))
    x = weights.randn(num_rows, width)
    for out in (
        torch.empty(num_rows, size, dtype=dtype, device=kernel_device),
        torch.empty(num_rows, size).to(x.device),
    ):
        CudaLinear(launcher, kernel_device, dtype).multiply(LinearKernel.CUBLAS, linear, x, out)
        check(out, in_float32(linear, x), dtype, True, element is FP8)


@pytest.mark.parametrize("num_rows", [1, 70])
@pytest.mark.parametrize(("parts", "width"), PARTS)
@pytest.mark.parametrize("name", [name for name in KINDS if "token" not in name and "static" not in name])
def test_products_of_dequantized_weights_are_those_of_the_reference(
    launcher: KernelLauncher,
    kernel_device: torch.device,
    dtype: torch.dtype,
    name: str,
    parts: tuple[int, ...],
    width: int,
    num_rows: int,
) -> None:
    make, is_quantized = KINDS[name]
    weights, size = RandomWeights(kernel_device, dtype), sum(parts)
    linear = linear_of(make(weights, parts, width), parts, width, weights.randn(size))
    x = weights.randn(num_rows, 2 * width)[:, :width]
    products = CudaLinear(launcher, kernel_device, dtype)
    has_kernel = "row" not in name  # groups of these are no powers of two
    assert products.kernels_of(linear)["many_rows"].startswith("dequantized by a kernel") == has_kernel
    for out in (
        torch.empty(num_rows, size, dtype=dtype, device=kernel_device),
        torch.empty(num_rows, size, device=kernel_device),
    ):
        products.multiply(LinearKernel.CUBLAS, linear, x, out)
        check(out, in_float32(linear, x), dtype, is_quantized, name.startswith("fp8"))


@pytest.mark.parametrize("width", [32, 100, 1500])
@pytest.mark.parametrize("element", Element)
def test_codes_and_scales_of_inputs_are_those_of_the_reference(
    launcher: KernelLauncher, kernel_device: torch.device, dtype: torch.dtype, element: Element, width: int
) -> None:
    weights = RandomWeights(kernel_device, dtype)
    x = weights.randn(6, width)
    x[1], x[2, 3], x[3, 0], x[4] = 0, torch.nan, torch.inf, x[4] * 1000
    for max_activation in (None, 1.25):
        form = InputForm(getattr(torch, element), element=element, max_activation=max_activation)
        prepared = prepare_input(launcher, x, form)
        # On the CPU: on a GPU torch divides by a number by multiplying with its reciprocal.
        scale = token_scale(x.cpu(), element, max_activation)
        assert prepared.scale is not None
        assert torch.equal(prepared.scale[0].cpu().nan_to_num(), scale.nan_to_num())
        usable = [0, 1, 4, 5]
        codes = prepared.values[0][usable].cpu().float()
        expected = to_codes(x.cpu(), scale, element)[usable].float()
        if kernel_device.type == "cuda":
            assert torch.equal(codes, expected)
        elif element is INT8:  # the interpreter does not round e4m3, and rounds twice where a GPU does once
            assert (codes - expected).abs().max() <= 1 and (codes != expected).float().mean() < 0.01


@pytest.mark.parametrize("num_rows", [2, 20, 64])
def test_all_rows_of_a_tile_lie_in_the_memory_of_codes(
    launcher: KernelLauncher, kernel_device: torch.device, num_rows: int
) -> None:
    """Where the copy unit would have to leave some out, it is slow."""
    x = RandomWeights(kernel_device, torch.float16).randn(num_rows, 96)
    codes = prepare_input(launcher, x, InputForm(torch.int8, element=INT8)).values[0]
    assert codes.shape == x.shape and codes.stride() == (96, 1)
    assert num_rows_there(codes, MAX_ROWS) == MAX_ROWS


def test_groups_of_the_input_have_scales_of_their_own(
    launcher: KernelLauncher, kernel_device: torch.device, dtype: torch.dtype
) -> None:
    x = RandomWeights(kernel_device, dtype).randn(3, 300) * torch.linspace(0.01, 10, 300, device=kernel_device).to(
        dtype
    )
    prepared = prepare_input(launcher, x, InputForm(torch.float16, element=FP8, group_size=128))
    assert prepared.scale is not None and prepared.scale.shape == (1, 3, 3)
    scale = prepared.scale[0].repeat_interleave(128, dim=1)[:, :300]
    found = (prepared.values[0].float() * scale).to(dtype)
    check(found, rounded_by_groups(x, 128), dtype, True, True)


def test_layers_without_kernels_say_why(launcher: KernelLauncher, kernel_device: torch.device) -> None:
    weights = RandomWeights(kernel_device, torch.float16)
    products = CudaLinear(launcher, kernel_device, torch.float16)
    unaligned = linear_of(weights.scaled(FP8, Activations.STATIC, (40, 24), 96), (40, 24), 96, None)
    assert not products.can_stream(unaligned)
    assert "[40, 24]" in products.kernels_of(unaligned)["few_rows"]
    odd = linear_of(weights.scaled(INT8, Activations.TOKEN, (40,), 90), (40,), 90, None)
    assert products.can_stream(odd) and "of 90" in products.kernels_of(odd)["many_rows"]
