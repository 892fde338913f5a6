"""Rates of the attention kernels next to the card's copy and matrix rates: decode in TB/s, prefill in TFLOP/s.

    python bench/attention.py --json attention.json --plot attention.svg

Needs a CUDA device and triton. Every figure is the median over replays of a CUDA graph that runs the layers
one after the other, each with its own random cache, so that nothing stays in the second-level cache.
If FlashInfer can be imported, its kernels are timed too; they neither rotate nor append.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bench.gpu.attention_steps import Shape
from bench.gpu.device_rates import describe_environment, measure_copy_rate, measure_matrix_rate, require_gpu

if TYPE_CHECKING:
    from bench.gpu.attention_kernels import Row

CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
HEADER = (
    f"{'kind':8}{'heads':>11}{'block':>6} {'step':<18}{'µs':>9}{'rate':>8}{'share':>7}{'FlashInfer µs':>15}"
)


def main() -> None:
    arguments = parse_arguments()
    require_gpu("triton")
    from bench.gpu.attention_kernels import Bench, import_flashinfer  # they need triton

    device, dtype = torch.device("cuda"), getattr(torch, arguments.dtype)
    copy_rate, matrix_rate = measure_copy_rate(device), measure_matrix_rate(device, dtype)
    print(f"copy {copy_rate:.2f} TB/s (read + written), matrix product {matrix_rate:.0f} TFLOP/s")
    flashinfer = None if arguments.no_flashinfer else import_flashinfer()
    rows: list[Row] = []
    cache_dtype = CACHE_DTYPES.get(arguments.kv_cache_dtype, dtype)
    bench = Bench(device, dtype, cache_dtype, copy_rate, matrix_rate, flashinfer, arguments.flashinfer_prefill)
    print(HEADER)
    for shape in arguments.shapes:
        for block_size in arguments.block_sizes:
            for batch, context in arguments.decode:
                rows.append(show(bench.decode(shape, block_size, batch, context)))
            for batch, length in arguments.prefill:
                rows.extend(map(show, bench.prefill(shape, block_size, batch, length)))
    for batch, context in arguments.decode:
        rows.append(show(bench.begin_step(arguments.shapes[0], arguments.block_sizes[0], batch, context)))
    if arguments.json is not None:
        report = {
            "environment": describe_environment(device),
            "copy_tb_per_s": copy_rate,
            "matrix_tflop_per_s": matrix_rate,
            "dtype": arguments.dtype,
            "kv_cache_dtype": arguments.kv_cache_dtype,
            "flashinfer": getattr(flashinfer, "__version__", None),
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        save_plot(rows, copy_rate, matrix_rate, arguments.plot)


def save_plot(rows: list[Row], copy_rate: float, matrix_rate: float, file: Path) -> None:
    """Draws the rates of decode and prefill and the measured ceilings, as PNG or SVG."""
    from matplotlib.figure import Figure  # needed here only

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    panels = (("decode", "keys and values read (TB/s)", copy_rate), ("prefill", "TFLOP/s", matrix_rate))
    for axes, (kind, label, ceiling) in zip(figure.subplots(1, 2), panels, strict=True):
        shown = [row for row in rows if row.kind == kind]
        axes.bar(
            [f"{row.step}\n{row.shape}\nblock {row.block_size}" for row in shown], [row.rate for row in shown]
        )
        axes.axhline(
            ceiling, color="black", linestyle="--", label="copy" if kind == "decode" else "matrix product"
        )
        axes.set(title=kind, ylabel=label)
        axes.tick_params(axis="x", labelsize=6)
        axes.legend()
    figure.savefig(file, dpi=120)


def show(row: Row) -> Row:
    rate = "" if row.rate is None else f"{row.rate:.2f}" if row.kind != "prefill" else f"{row.rate:.0f}"
    share = "" if row.share is None else f"{row.share:.0%}"
    theirs = "" if row.flashinfer_microseconds is None else f"{row.flashinfer_microseconds:.1f}"
    print(
        f"{row.kind:8}{row.shape:>11}{row.block_size:>6} {row.step:<18}{row.microseconds:>9.1f}"
        f"{rate:>8}{share:>7}{theirs:>15}",
        flush=True,
    )
    return row


def parse_arguments() -> argparse.Namespace:
    def shape(text: str) -> Shape:
        return Shape(*map(int, text.split("/")))

    def step(text: str) -> tuple[int, int]:
        batch, length = map(int, text.split("x"))
        return batch, length

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes",
        type=shape,
        nargs="+",
        default=[Shape(32, 32, 128)],
        help="heads/kv_heads/head_dim (default: 32/32/128)",
    )
    parser.add_argument(
        "--block-sizes", type=int, nargs="+", default=[16], help="tokens per block (default: 16)"
    )
    parser.add_argument(
        "--decode",
        type=step,
        nargs="*",
        default=[(1, 500), (1, 2048), (8, 1024), (64, 512), (64, 2048), (256, 512), (512, 256)],
        help="batch x context, as 64x2048",
    )
    parser.add_argument(
        "--prefill",
        type=step,
        nargs="*",
        default=[(1, 235), (34, 235), (1, 2048), (4, 2048), (1, 8192)],
        help="batch x prompt length, as 4x2048",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("model", *CACHE_DTYPES),
        default="model",
        help="how keys and values are stored; rates count these bytes (default: model, as --dtype)",
    )
    parser.add_argument(
        "--no-flashinfer", action="store_true", help="do not time FlashInfer, even if it is installed"
    )
    parser.add_argument(
        "--flashinfer-prefill",
        choices=("fa2", "fa3"),
        default="fa2",
        help="FlashInfer's prefill kernels; compiled at first use, which takes minutes for fa3 (default: fa2)",
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--plot", type=Path, help="PNG or SVG of the rates; needs matplotlib")
    return parser.parse_args()


if __name__ == "__main__":
    main()
