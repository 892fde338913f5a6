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
from triton.experimental.gluon._runtime import GluonASTSource

from services.dense_worker.kernels.linear.quantized.operands import Codes
from services.dense_worker.kernels.linear.quantized.tile_choice import CODE_TILES, VALUE_TILES, Tiles
from services.dense_worker.kernels.linear.quantized.triton_block_tiles import _block_tiles_kernel
from services.dense_worker.kernels.linear.quantized.triton_skinny_quantized import _skinny_quantized_kernel
from services.dense_worker.kernels.linear.quantized.triton_value_tiles import _value_tiles_kernel
from services.dense_worker.kernels.linear.triton_skinny import _skinny_kernel, choose_skinny_tiles
from services.dense_worker.kernels.linear.triton_skinny_hopper import hopper_skinny_kernel
from services.dense_worker.kernels.lora.triton_fused_hopper import _shrink_kernel, choose_tiles_beside

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
    other_bytes: int = 0,
) -> str:
    """The PTX of the kernel, of which so many programs must fit into an SM, besides others of so many bytes."""
    constants |= {"DTYPE": tl.bfloat16, "PDL": True, "IS_PADDED": False, "NUM_SPLITS": tiles.num_splits}
    constants |= {"BLOCK_ROWS": tiles.block_rows, "BLOCK_OUT": tiles.block_out, "BLOCK_IN": tiles.block_in}
    constants |= {"NUM_STAGES": tiles.num_stages, "ROW_GROUP_SIZE": 128 if "x_scale" in types else 1}
    types |= {"out": BRAIN, "bias": BRAIN, "partial_sums": "*fp32", "num_done": "*i32"}
    types |= dict.fromkeys((*INTEGERS, *STRIDES), "i32") | {"eps": "fp32"}
    signature, values, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if types.get(name) is None:
            signature[name], values[(i,)] = "constexpr", constants.get(name)
            continue
        signature[name] = types[name]
        if types[name].startswith("*") or name in (*STRIDES, "out_features", "in_features"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, values, aligned)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": tiles.num_warps})
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    num_registers, stack_bytes = map(int, found.groups())
    assert stack_bytes <= (0 if tiles.num_splits == 1 else MAX_STACK_BYTES), usage
    assert programs_per_sm * (compiled.metadata.shared + 1024) + other_bytes <= SM_BYTES
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


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("num_rows", [16, 64])
@pytest.mark.parametrize(("element", "sums"), [("*fp8e4nv", "f32.e4m3.e4m3"), ("*i8", "s32.s8.s8")])
def test_few_rows_are_multiplied_as_codes(
    element: str, sums: str, num_rows: int, is_gated: bool, tmp_path: Path
) -> None:
    chosen = choose_skinny_tiles(num_rows, 4096, is_gated, num_sms=132, itemsize=1)
    tiles = Tiles(num_rows, 64, chosen.block_in, chosen.num_stages, 4, max_splits=8, num_splits=chosen.num_splits)
    types: dict[str, str | None] = {"x": element, "weight": element, "x_scale": "*fp32", "weight_scale": "*fp32"}
    constants = {"IS_GATED": is_gated, "ACTIVATION": "silu" if is_gated else None}
    assert f"{num_rows}k32.{sums}" in check(_skinny_kernel, types, constants, tiles, tmp_path, 1)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("num_rows", [16, 32, 64])
@pytest.mark.parametrize(
    ("element", "product", "has_norms"),
    [
        ("bf16", "k16.f32.bf16.bf16", False),
        ("bf16", "k16.f32.bf16.bf16", True),
        ("fp8e4nv", "k32.f32.e4m3.e4m3", False),
        ("i8", "k32.s32.s8.s8", False),
    ],
)
def test_on_hopper_weights_of_few_rows_are_copied_before_the_kernel_waits(
    element: str, product: str, has_norms: bool, num_rows: int, is_gated: bool, tmp_path: Path
) -> None:
    bits = 16 if element == "bf16" else 8
    out_features = 11008 if is_gated else 4096
    chosen = choose_skinny_tiles(num_rows, out_features, is_gated, num_sms=132, itemsize=bits // 8, is_ahead=True)
    tiles = Tiles(num_rows, 64, chosen.block_in, chosen.num_stages, 4, max_splits=8, num_splits=chosen.num_splits)
    layout = f"NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth={bits}, rank=2)"
    types: dict[str, str | None] = {"x": f"tensordesc<{element}[{num_rows}, {tiles.block_in}],{layout}>"}
    types["weight"] = f"tensordesc<{element}[1, 64, {tiles.block_in}],{layout.replace('rank=2', 'rank=3')}>"
    if bits == 8:
        types |= {"x_scale": "*fp32", "weight_scale": "*fp32"}
    if has_norms:  # halves of the one before and of the one after the product, which no product has together
        types |= {"squares_before": "*fp32", "weight_after": BRAIN, "weighted": BRAIN, "squares_after": "*fp32"}
    constants = {"IS_GATED": is_gated, "ACTIVATION": "silu" if is_gated else None, "HEIGHT": chosen.height}
    ptx = check(hopper_skinny_kernel, types, constants, tiles, tmp_path, 2 if is_gated else 1)
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert before.count("cp.async.bulk.tensor") == tiles.num_stages * (1 + is_gated)
    assert after.count("cp.async.bulk.tensor") == tiles.num_stages + 2 + is_gated, "rows, and a tile in the loop"
    assert "ld.global" not in before and f"m64n{num_rows}{product}" in after


@pytest.mark.parametrize(("out_features", "num_projections"), [(4096, 1), (11008, 2), (12288, 3)])
@pytest.mark.parametrize("num_rows", [16, 64])
def test_on_hopper_a_program_of_adapters_finds_room_beside_those_of_products(
    num_rows: int, out_features: int, num_projections: int, tmp_path: Path
) -> None:
    is_gated, small_bytes = num_projections == 2, 13 << 10
    chosen = choose_tiles_beside(num_rows, out_features, is_gated, num_sms=132, most_tiles=None)
    tiles = Tiles(num_rows, 64, chosen.block_in, chosen.num_stages, 4, max_splits=8, num_splits=chosen.num_splits)
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)"
    weight = f"tensordesc<bf16[1, 64, {tiles.block_in}],{layout.replace('rank=2', 'rank=3')}>"
    types: dict[str, str | None] = {"x": f"tensordesc<bf16[{num_rows}, {tiles.block_in}],{layout}>", "weight": weight}
    counts = dict.fromkeys(("ranks", "column_starts", "row_slots", "counters", "num_parts_done"), "*i32")
    constants = {"IS_GATED": is_gated, "ACTIVATION": "silu" if is_gated else None, "HEIGHT": chosen.height}
    constants |= {"NUM_PROJECTIONS": num_projections, "GROUP_SIZE": 128, "RANK_TILES": 8 * num_projections}
    types |= {"b": weight, "hidden": types["x"], **counts}
    programs_per_sm = 1 if num_projections == 1 else 2
    ptx = check(hopper_skinny_kernel, types, constants, tiles, tmp_path, programs_per_sm, small_bytes)
    assert ptx.index("fence.proxy.async.global") < ptx.index("griddepcontrol.wait"), "it waits for the end at its own"
    num_splits = 132 // (8 * num_projections)
    types = {"x": BRAIN, "a": BRAIN, "hidden": BRAIN, **counts}
    constants = {"NUM_PROJECTIONS": num_projections, "NUM_SLOTS": 8, "NUM_RANKS": 128, "RANK_STEP": 16, "MAX_ROWS": 64}
    constants |= {"HIDDEN_STRIDE": 128, "NUM_BLOCKS": -(-32 // num_splits)}
    tiles = Tiles(num_rows, 16, 128, 1, 4, max_splits=num_splits, num_splits=num_splits)
    ptx = check(_shrink_kernel, types, constants, tiles, tmp_path, 1, SM_BYTES - small_bytes)
    assert ptx.index("ld.global") < ptx.index("griddepcontrol.wait"), "A is read before the wait"


@pytest.mark.parametrize("num_rows", [16, 64])
def test_few_rows_of_blocks_are_multiplied_as_codes(num_rows: int, tmp_path: Path) -> None:
    tiles = Tiles(num_rows, 64, block_in=128, num_stages=4, num_warps=4, max_splits=8)
    types: dict[str, str | None] = {"x": "*fp8e4nv", "weight": "*fp8e4nv", "x_scale": "*fp32", "scale": "*fp32"}
    constants = {"CODES": int(Codes.E4M3), "GROUP_SIZE": 128, "DOT_SIZE": 128, "NUM_VERSIONS": 1, "IS_GATED": False}
    assert f"{num_rows}k32.f32.e4m3.e4m3" in check(_skinny_quantized_kernel, types, constants, tiles, tmp_path, 2)
