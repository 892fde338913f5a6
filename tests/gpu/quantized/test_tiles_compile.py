"""The kernels of tiles compiled for Hopper, which needs triton but no GPU: what they take of an SM."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.dense_worker.kernels.linear.quantized.operands import Codes
from services.dense_worker.kernels.linear.quantized.tile_choice import CODE_TILES, VALUE_TILES, Tiles
from services.dense_worker.kernels.linear.quantized.triton_block_tiles import _block_tiles_kernel
from services.dense_worker.kernels.linear.quantized.triton_value_tiles import _value_tiles_kernel

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
HOPPER = GPUTarget("cuda", 90, 32)
SM_BYTES, SM_REGISTERS = 228 << 10, 1 << 16  # of a program 1,024 bytes are the system's
MAX_STACK_BYTES = 32  # of a thread, for what does not stay in registers: where splits are added up, after the loop
BRAIN = "*bf16"
INTEGERS = ("num_rows", "out_features", "in_features", "first_end", "second_end")
STRIDES = ("x_version_stride", "x_stride", "out_stride")
FORMATS: dict[str, dict[str, Any]] = {
    "int4 g128": {"CODES": Codes.UINT4, "GROUP_SIZE": 128, "scale": BRAIN},
    "int4 g32 zero": {"CODES": Codes.UINT4, "GROUP_SIZE": 32, "scale": BRAIN, "zero_point": "*u8"},
    "int8": {"CODES": Codes.INT8, "GROUP_SIZE": 0, "scale": "*fp32"},
    "int8 g32 zero": {"CODES": Codes.UINT8, "GROUP_SIZE": 32, "scale": BRAIN, "zero_point": "*u8"},
    "mxfp4": {"CODES": Codes.E2M1, "GROUP_SIZE": 32, "scale": "*u8"},
}


def all_splits(candidates: tuple[Tiles, ...]) -> list[Tiles]:
    numbers = [(tiles, num) for tiles in candidates for num in (1, 2, 4) if num <= tiles.max_splits]
    return [replace(tiles, num_splits=num) for tiles, num in numbers]


def describe(tiles: Tiles) -> str:
    return f"{tiles.block_rows}x{tiles.block_out}/{tiles.num_splits}"


def check(
    kernel: Any,
    types: dict[str, str | None],
    constants: dict[str, Any],
    tiles: Tiles,
    folder: Path,
    programs_per_sm: int,
) -> str:
    """The PTX of the kernel, of which so many programs must fit into an SM."""
    constants |= {"DTYPE": tl.bfloat16, "PDL": True, "IS_PADDED": False, "NUM_SPLITS": tiles.num_splits}
    constants |= {"BLOCK_ROWS": tiles.block_rows, "BLOCK_OUT": tiles.block_out, "BLOCK_IN": tiles.block_in}
    constants |= {"NUM_STAGES": tiles.num_stages, "ROW_GROUP_SIZE": 128 if "x_scale" in types else 1}
    types |= {"out": BRAIN, "bias": BRAIN, "partial_sums": "*fp32", "num_done": "*i32"}
    types |= dict.fromkeys((*INTEGERS, *STRIDES), "i32")
    signature, values, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if types.get(name) is None:
            signature[name], values[(i,)] = "constexpr", constants.get(name)
            continue
        signature[name] = types[name]
        if types[name].startswith("*") or name in (*STRIDES, "out_features", "in_features"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, aligned)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": tiles.num_warps})
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    num_registers, stack_bytes = map(int, found.groups())
    assert stack_bytes <= (0 if tiles.num_splits == 1 else MAX_STACK_BYTES), usage
    assert programs_per_sm * (compiled.metadata.shared + 1024) <= SM_BYTES
    assert programs_per_sm * num_registers * tiles.num_warps * 32 <= SM_REGISTERS
    return compiled.asm["ptx"]


@pytest.mark.parametrize("tiles", all_splits(VALUE_TILES), ids=describe)
@pytest.mark.parametrize("name", FORMATS)
def test_tiles_of_values_stay_in_registers(name: str, tiles: Tiles, tmp_path: Path) -> None:
    form = FORMATS[name]
    weight = "*i8" if form["CODES"] is Codes.INT8 else "*u8"
    types = {"x": BRAIN, "weight": weight, "scale": form["scale"], "zero_point": form.get("zero_point")}
    constants = {"CODES": int(form["CODES"]), "GROUP_SIZE": form["GROUP_SIZE"], "NUM_VERSIONS": 1}
    constants["SCALED_SIZE"] = min(form["GROUP_SIZE"] or 1, tiles.block_in // 2)
    programs_per_sm = 2 if tiles == VALUE_TILES[0] and "int8 g32" not in name else 1
    ptx = check(_value_tiles_kernel, types, constants, tiles, tmp_path, programs_per_sm)
    assert re.search(r"wgmma\.mma_async\S* \{[^}]*\}, \{", ptx), "codes go to the tensor cores from registers"


@pytest.mark.parametrize("tiles", all_splits(CODE_TILES), ids=describe)
def test_tiles_of_codes_stay_in_registers(tiles: Tiles, tmp_path: Path) -> None:
    types: dict[str, str | None] = {"x": "*fp8e4nv", "weight": "*fp8e4nv", "x_scale": "*fp32", "scale": "*fp32"}
    programs_per_sm = 2 if tiles == CODE_TILES[0] else 1
    ptx = check(_block_tiles_kernel, types, {"GROUP_SIZE": 128}, tiles, tmp_path, programs_per_sm)
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in ptx
