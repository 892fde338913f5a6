"""Products of quantized layers for many rows, by format and kernel, beside cuBLAS in bfloat16. Microseconds.

    python bench/gpu/quantized_products.py                                 # the layers of Llama-3.1-8B
    python bench/gpu/quantized_products.py --layer 4096x11008 --rows 128 512 --format int4-g128 --json FILE

Every figure is the median of replays of a CUDA graph, on random data, over more weights than the L2 cache holds.
*dequantized* and *tiled* are what `LinearChoice` decides between, with the kernel that prepares the input; *each* has
the kernel of tiles alone, for all tiles and splits, as rows x features / splits. The one with * is that of the choice.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from bench.gpu.device_rates import describe_environment, require_gpu
from services.common.quantization.schemes import Activations
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.linear.linear_choice import TILED_BUCKETS, LinearKernel, time_in_graph_us
from services.dense_worker.kernels.linear.quantized.operands import PreparedInput
from services.dense_worker.kernels.linear.quantized.tile_choice import CODE_TILES, LARGEST_TILE, VALUE_TILES, Tiles
from services.dense_worker.parameters import parameters
from tests.support.quantized.random_weights import INT8, Make, RandomWeights, linear_of

FORMATS: dict[str, Make] = {
    "int4-g128": lambda w, parts, k: w.grouped(4, 128, False, False, parts, k),
    "int4-g128-zero": lambda w, parts, k: w.grouped(4, 128, True, False, parts, k),
    "int4-g32": lambda w, parts, k: w.grouped(4, 32, False, False, parts, k),
    "int4-g128-order": lambda w, parts, k: w.grouped(4, 128, False, True, parts, k),
    "int8-g128": lambda w, parts, k: w.grouped(8, 128, False, False, parts, k),
    "int8": lambda w, parts, k: w.scaled(INT8, Activations.NONE, parts, k),
    "fp8-blocks": lambda w, parts, k: w.blocks(parts, k),
    "mxfp4": lambda w, parts, k: w.mxfp4(parts, k),
}
FEW_FORMATS = ("int4-g128", "int4-g128-zero", "int4-g32", "fp8-blocks", "int8", "mxfp4")
LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # qkv, o, gate and up, down
MIN_BYTES = 150 << 20  # of distinct weights in one measurement: three times the L2 cache of an H200


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table, times in microseconds."""

    format: str
    out_features: int
    in_features: int
    num_rows: int
    bfloat16_us: float
    dequantized_us: float
    tiled_us: float
    chosen: str
    each_us: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FEW_FORMATS), help="formats of weights")
    parser.add_argument("--layer", nargs="+", type=_shape, default=list(LAYERS), help="OUTxIN features")
    parser.add_argument("--rows", nargs="+", type=int, default=list(TILED_BUCKETS), help="tokens of a step, 65 to 1024")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    require_gpu("triton")
    device = torch.device("cuda")
    names = f"{'format':16}{'out x in':>14}{'rows':>6}{'bfloat16':>10}{'dequantized':>13}{'tiled':>8}{'TFLOP/s':>9}"
    print(f"{names}  each")
    with torch.inference_mode():
        bench = ProductBench(device)
        rows = []
        for name in arguments.format:
            for shape in arguments.layer:
                rows += [_show(row) for row in bench.measure(name, shape, arguments.rows)]
    if arguments.json:
        report = {"environment": describe_environment(device), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=1))


class ProductBench:
    """Times products on a device in bfloat16."""

    def __init__(self, device: torch.device) -> None:
        from services.dense_worker.backends.cuda_linear import CudaLinear
        from services.dense_worker.kernels.linear.quantized.tiled_matmul import TiledMatmul
        from services.dense_worker.kernels.linear.triton_tiles import SPLIT_AREA, SplitWorkspace
        from services.dense_worker.kernels.triton_launch import KernelLauncher

        self._device, self._launcher = device, KernelLauncher(device)
        self._products = CudaLinear(self._launcher, device, torch.bfloat16)
        self._tiled = TiledMatmul(self._launcher, device, torch.bfloat16)
        self._splits = SplitWorkspace(device, self._launcher.num_sms * LARGEST_TILE // SPLIT_AREA)

    def measure(self, name: str, shape: tuple[int, int], all_rows: list[int]) -> list[Row]:
        """A line for each number of rows."""
        out_features, in_features = shape
        weights, parts = RandomWeights(self._device, torch.bfloat16), (out_features,)
        linears: list[Linear] = []
        while sum(self._num_bytes(linear) for linear in linears) < MIN_BYTES:
            linears.append(linear_of(FORMATS[name](weights, parts, in_features), parts, in_features, None))
        plain = [weights.randn(*shape) for _ in range(-(-MIN_BYTES // (2 * out_features * in_features)))]
        inputs = [weights.randn(num_rows, in_features) for num_rows in all_rows]
        self._compile(linears[0], inputs)
        return [self._measure_rows(name, linears, plain, x) for x in inputs]

    def _compile(self, linear: Linear, inputs: list[torch.Tensor]) -> None:
        """All kernels, several at a time."""
        with self._launcher.compiling():
            for x in inputs:
                out = torch.empty(len(x), linear.out_features, dtype=x.dtype, device=self._device)
                for kernel in (LinearKernel.CUBLAS, LinearKernel.TILED):
                    self._products.multiply(kernel, linear, x, out)
                for tiles in self._all_tiles(linear, len(x)):
                    self._run_tiles(linear, tiles, x, out)

    def _measure_rows(self, name: str, linears: list[Linear], plain: list[torch.Tensor], x: torch.Tensor) -> Row:
        first = linears[0]
        out = torch.empty(len(x), first.out_features, dtype=x.dtype, device=self._device)

        def time_us(kernel: LinearKernel) -> float:
            run = self._products.multiply
            return time_in_graph_us(lambda: [run(kernel, linear, x, out) for linear in linears]) / len(linears)

        prepared = self._prepare(first, x)
        each_us = {}
        for tiles in self._all_tiles(first, len(x)):
            runs = [partial(self._run_tiles, linear, tiles, x, out, prepared) for linear in linears]
            each_us[_name(tiles)] = time_in_graph_us(lambda runs=runs: [run() for run in runs]) / len(linears)
        return Row(
            name,
            first.out_features,
            first.in_features,
            len(x),
            time_in_graph_us(lambda: [torch.mm(x, weight.t(), out=out) for weight in plain]) / len(plain),
            time_us(LinearKernel.CUBLAS),
            time_us(LinearKernel.TILED),
            _name(self._tiled.tiles(first, len(x))),
            each_us,
        )

    def _prepare(self, linear: Linear, x: torch.Tensor) -> PreparedInput:
        from services.dense_worker.kernels.linear.quantized.triton_prepare import prepare_input

        form = self._tiled.input_form(linear)
        return PreparedInput(x[None], None) if form.is_any else prepare_input(self._launcher, x, form)

    def _run_tiles(
        self,
        linear: Linear,
        tiles: Tiles,
        x: torch.Tensor,
        out: torch.Tensor,
        prepared: PreparedInput | None = None,  # None: x is prepared first
    ) -> None:
        from services.dense_worker.kernels.linear.quantized.quantized_gemv import OPERANDS
        from services.dense_worker.kernels.linear.quantized.triton_block_tiles import multiply_block_tiles
        from services.dense_worker.kernels.linear.quantized.triton_value_tiles import multiply_value_tiles

        prepared = prepared or self._prepare(linear, x)
        matrix = OPERANDS[type(linear.weight)].matrix(linear.weight)
        multiply = multiply_value_tiles if prepared.scale is None else multiply_block_tiles
        multiply(self._launcher, prepared, matrix, None, out, x.dtype, self._splits, tiles)

    def _all_tiles(self, linear: Linear, num_rows: int) -> list[Tiles]:
        """Those of the kernel for this format, split in every way for which there is room."""
        candidates = VALUE_TILES if self._tiled.input_form(linear).element is None else CODE_TILES
        found = []
        for tiles in candidates:
            num_tiles = tiles.num_tiles(num_rows, linear.out_features)
            splits = [num for num in (1, 2, 4) if num <= tiles.max_splits]
            fits = [num for num in splits if num == 1 or num * num_tiles <= self._launcher.num_sms]
            found += [replace(tiles, num_splits=num) for num in fits]
        return found

    def _num_bytes(self, linear: Linear) -> int:
        return sum(parameter.data.nbytes for parameter in parameters(linear.weight))


def _shape(text: str) -> tuple[int, int]:
    out_features, in_features = map(int, text.split("x"))
    return out_features, in_features


def _name(tiles: Tiles) -> str:
    return f"{tiles.block_rows}x{tiles.block_out}/{tiles.num_splits}"


def _show(row: Row) -> Row:
    """Prints a line."""
    tflop_s = 2 * row.num_rows * row.out_features * row.in_features / row.tiled_us / 1e6
    shape = f"{row.out_features} x {row.in_features}"
    times = f"{row.bfloat16_us:10.1f}{row.dequantized_us:13.1f}{row.tiled_us:8.1f}{tflop_s:9.0f}"
    each = "  ".join(f"{'*' * (name == row.chosen)}{name} {us:.1f}" for name, us in row.each_us.items())
    print(f"{row.format:16}{shape:>14}{row.num_rows:6}{times}  {each}", flush=True)
    return row


if __name__ == "__main__":
    main()
