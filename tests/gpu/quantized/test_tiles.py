"""The kernels of tiles against the formats' references in float32, which round nothing but codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from services.common.families.shape import Activation
from services.common.quantization.schemes import Activations, Element
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.linear.quantized.activations import to_codes, token_scale
from services.dense_worker.kernels.norm.norm import RmsNorm
from services.dense_worker.parameters import Parameter
from tests.support.quantized.random_weights import KINDS, RandomWeights, in_float32, linear_of

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.backends.cuda_linear import CudaLinear
from services.dense_worker.kernels.linear.linear_choice import LinearKernel
from services.dense_worker.kernels.linear.quantized.operands import PreparedInput
from services.dense_worker.kernels.linear.quantized.quantized_gemv import OPERANDS
from services.dense_worker.kernels.linear.quantized.tile_choice import CODE_TILES, LARGEST_TILE, VALUE_TILES, Tiles
from services.dense_worker.kernels.linear.quantized.tiled_matmul import TiledMatmul
from services.dense_worker.kernels.linear.quantized.triton_block_tiles import multiply_block_tiles
from services.dense_worker.kernels.linear.quantized.triton_prepare import prepare_input
from services.dense_worker.kernels.linear.quantized.triton_value_tiles import multiply_value_tiles
from services.dense_worker.kernels.linear.triton_tiles import SPLIT_AREA, SplitWorkspace
from services.dense_worker.kernels.triton_launch import KernelLauncher

# ‖out − reference‖ / ‖reference‖. Weights and the result are rounded to 2^-9 or 2^-12.
TOLERANCES = {torch.bfloat16: 6e-3, torch.float16: 8e-4}
# An input that lies between two codes may become the other one, and tensor cores sum FP8 with about 14 bits. Triton's
# interpreter, moreover, cuts e4m3 off where inputs are quantized: the last bit is 2^-3 of a number.
OTHER_CODE, CUT_OFF = 1e-2, 0.13
EPS = 1e-5
HOPPER_SHARED_BYTES = 227 << 10
NAMES = [name for name in KINDS if "token" not in name and "static" not in name]
# (rows of each projection, in_features, rows of the step): remainders in all of them.
SHAPES = [((192,), 576, 70), ((128, 128, 40), 320, 150), ((130,), 192, 129)]


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


def splits_for(num_programs: int, device: torch.device) -> SplitWorkspace:
    """Room for so many programs of the largest tiles. A sum that is read before it is written makes NaN of a result."""
    splits = SplitWorkspace(device, num_programs * LARGEST_TILE // SPLIT_AREA)
    splits.partial_sums.fill_(torch.nan)
    return splits


def all_splits(candidates: tuple[Tiles, ...]) -> list[Tiles]:
    numbers = [(tiles, num) for tiles in candidates for num in (1, 2, 4) if num <= tiles.max_splits]
    return [replace(tiles, num_splits=num) for tiles, num in numbers]


def describe(tiles: Tiles) -> str:
    return f"{tiles.block_rows}x{tiles.block_out}/{tiles.num_splits}"


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def tolerance(name: str, dtype: torch.dtype, device: torch.device) -> float:
    if name == "fp8 blocks":
        return CUT_OFF if device.type == "cpu" else OTHER_CODE
    return TOLERANCES[dtype]


@pytest.mark.parametrize(("parts", "width", "num_rows"), SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_the_reference(
    launcher: KernelLauncher,
    kernel_device: torch.device,
    dtype: torch.dtype,
    name: str,
    parts: tuple[int, ...],
    width: int,
    num_rows: int,
) -> None:
    make, _ = KINDS[name]
    weights, size = RandomWeights(kernel_device, dtype), sum(parts)
    linear = linear_of(make(weights, parts, width), parts, width, weights.randn(size))
    products = CudaLinear(launcher, kernel_device, dtype)
    assert products.can_tile(linear)
    # As in the backend, the input and the result lie in wider workspaces.
    x = weights.randn(num_rows, 2 * width)[:, :width]
    workspace = torch.full((num_rows + 1, size + 8), torch.nan, dtype=dtype, device=kernel_device)
    out = workspace[:num_rows, :size]
    products.multiply(LinearKernel.TILED, linear, x, out)
    assert relative_error(out, in_float32(linear, x)) < tolerance(name, dtype, kernel_device)
    assert workspace[num_rows:].isnan().all() and workspace[:, size:].isnan().all()

    wide = torch.full((num_rows, size), torch.nan, device=kernel_device)
    products.multiply(LinearKernel.TILED, linear, x, wide)
    assert torch.equal(wide, out.float()), "rounded to the model's dtype, too"


@pytest.mark.parametrize("tiles", all_splits(VALUE_TILES), ids=describe)
@pytest.mark.parametrize("name", ["int4 g32", "int4 g64 zero", "int4 row order", "int8", "int8 g32 zero", "mxfp4"])
def test_every_tile_and_split_of_values(
    launcher: KernelLauncher, kernel_device: torch.device, dtype: torch.dtype, name: str, tiles: Tiles
) -> None:
    parts, width, num_rows = ((256, 256, 40) if "order" in name else (300,)), 1088, 140
    make, _ = KINDS[name]
    weights = RandomWeights(kernel_device, dtype)
    linear = linear_of(make(weights, parts, width), parts, width, weights.randn(sum(parts)))
    operands, splits = OPERANDS[type(linear.weight)], splits_for(64, kernel_device)
    form = operands.input_form(linear.weight, dtype)
    for _ in range(2):  # the second time with the counters that the first one left
        x = weights.randn(num_rows, width)
        out = torch.full((num_rows, sum(parts)), torch.nan, dtype=dtype, device=kernel_device)
        prepared = PreparedInput(x[None], None) if form.is_any else prepare_input(launcher, x, form)
        matrix = operands.matrix(linear.weight)
        multiply_value_tiles(launcher, prepared, matrix, linear.bias_data, out, dtype, splits, tiles)
        assert relative_error(out, in_float32(linear, x)) < TOLERANCES[dtype]
        assert not splits.num_done.any()


@pytest.mark.parametrize("tiles", all_splits(CODE_TILES), ids=describe)
def test_every_tile_and_split_of_codes(
    launcher: KernelLauncher, kernel_device: torch.device, dtype: torch.dtype, tiles: Tiles
) -> None:
    """With inputs that torch has quantized, so that only the products differ."""
    parts, width, num_rows = (256, 40), 1088, 140
    weights = RandomWeights(kernel_device, dtype)
    linear = linear_of(weights.blocks(parts, width), parts, width, weights.randn(sum(parts)))
    splits = splits_for(32, kernel_device)
    for _ in range(2):
        groups = F.pad(weights.randn(num_rows, width), (0, -width % 128)).unflatten(1, (-1, 128))
        scale = token_scale(groups.float(), Element.FP8)
        codes = to_codes(groups.float(), scale, Element.FP8)
        values = codes.flatten(1)[:, :width].contiguous()
        prepared = PreparedInput(values[None], scale[None, :, :, 0].contiguous())
        exact = (codes.float() * scale).flatten(1)[:, :width].double()
        expected = exact @ linear.weight.dequantized().double().t() + linear.bias_data.double()
        out = torch.full((num_rows, sum(parts)), torch.nan, dtype=dtype, device=kernel_device)
        matrix = OPERANDS[type(linear.weight)].matrix(linear.weight)
        multiply_block_tiles(launcher, prepared, matrix, linear.bias_data, out, dtype, splits, tiles)
        assert relative_error(out, expected) < TOLERANCES[dtype]
        assert not splits.num_done.any()


@pytest.mark.parametrize("name", ["int4 g64 zero", "fp8 blocks"])
def test_norm_and_silu_are_fused_with_what_prepares_the_input(
    launcher: KernelLauncher, kernel_device: torch.device, dtype: torch.dtype, name: str
) -> None:
    make, _ = KINDS[name]
    weights, width, num_rows = RandomWeights(kernel_device, dtype), 256, 70
    linear = linear_of(make(weights, (128,), width), (128,), width, None)
    products = CudaLinear(launcher, kernel_device, dtype)
    norm = RmsNorm(Parameter("norm", 1 + 0.2 * weights.randn(width), ()), EPS)
    out = torch.full((num_rows, 128), torch.nan, dtype=dtype, device=kernel_device)
    assert products.fuses_norm(LinearKernel.TILED, linear, norm, num_rows, has_delta=True)
    residual, delta = weights.randn(num_rows, width), weights.randn(num_rows, width)
    total = residual + delta
    products.multiply(LinearKernel.TILED, linear, residual, out, norm=norm, delta=delta)
    assert torch.equal(residual, total)
    limit = tolerance(name, dtype, kernel_device)
    assert relative_error(out, in_float32(linear, norm.normalize(total))) < limit

    assert products.fuses_activation(LinearKernel.TILED, linear, num_rows)
    for activation in (MlpActivation(Activation.SILU, is_gated=True), MlpActivation(Activation.GELU, is_gated=False)):
        x = weights.randn(num_rows, 2 * width)[:, : (1 + activation.is_gated) * width]
        products.multiply(LinearKernel.TILED, linear, x, out, activation_before=activation)
        assert relative_error(out, in_float32(linear, activation.apply(x))) < limit


def why_not(launcher: KernelLauncher, device: torch.device, linear: Linear) -> str:
    reason = TiledMatmul(launcher, device, torch.float16).why_not(linear)
    assert reason is not None
    return reason


def test_layers_without_tiles_say_why(launcher: KernelLauncher, kernel_device: torch.device) -> None:
    weights = RandomWeights(kernel_device, torch.float16)
    codes = linear_of(weights.scaled(Element.INT8, Activations.TOKEN, (64,), 64), (64,), 64, None)
    assert "multiplied by torch" in why_not(launcher, kernel_device, codes)
    ordered = linear_of(weights.grouped(4, 32, False, True, (64, 128), 64), (64, 128), 64, None)
    assert "[64, 128] rows" in why_not(launcher, kernel_device, ordered)
    small = replace(weights.blocks((128,), 128), block_size=(64, 128))
    assert "64 x 128" in why_not(launcher, kernel_device, linear_of(small, (128,), 128, None))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [65, 256, 1024])
@pytest.mark.parametrize("name", ["int4 g64 zero", "fp8 blocks", "mxfp4", "int8"])
def test_a_captured_product_reads_what_is_there_at_replay(
    launcher: KernelLauncher, kernel_device: torch.device, name: str, num_rows: int
) -> None:
    """At the size of a model's layers, several in a row, with sums that are split and not."""
    make, _ = KINDS[name]
    weights, dtype = RandomWeights(kernel_device, torch.bfloat16), torch.bfloat16
    shapes = [((4096,), 4096), ((6144,), 4096), ((4096,), 6144)]
    linears = [linear_of(make(weights, parts, width), parts, width, None) for parts, width in shapes]
    products = CudaLinear(launcher, kernel_device, dtype)
    x = weights.randn(num_rows, 4096)

    def run() -> torch.Tensor:
        rows = x
        for linear in linears:
            out = torch.empty(num_rows, linear.out_features, dtype=dtype, device=kernel_device)
            products.multiply(LinearKernel.TILED, linear, rows, out)
            rows = out
        return rows

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(3):
        x.copy_(weights.randn(num_rows, 4096))
        graph.replay()
        again = found.clone()
        graph.replay()
        assert torch.equal(found, again), "sums of splits are added in one order"
        expected = x.float()
        for linear in linears:
            expected = in_float32(linear, expected.to(dtype))
        # Three layers, each with the rounding of one; quantized inputs also differ by what came before.
        assert relative_error(found, expected) < 4 * tolerance(name, dtype, kernel_device)
