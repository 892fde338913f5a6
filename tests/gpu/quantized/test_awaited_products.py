"""Products of codes, compiled for Hopper: a loop goes on only when tensor cores no longer read its registers."""

from __future__ import annotations

import os
import re

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from services.common.families.shape import Activation
from services.dense_worker.kernels.experts.triton_grouped_quantized import grouped_quantized
from services.dense_worker.kernels.experts.triton_router import PairBlocks
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.quantized.operands import InputForm, PreparedInput, QuantizedMatrix
from services.dense_worker.kernels.linear.quantized.quantized_gemv import OPERANDS
from services.dense_worker.kernels.linear.quantized.tile_choice import VALUE_TILES
from services.dense_worker.kernels.linear.quantized.triton_skinny_quantized import skinny_quantized
from services.dense_worker.kernels.linear.quantized.triton_value_tiles import multiply_value_tiles
from services.dense_worker.kernels.linear.triton_tiles import SplitWorkspace
from tests.support.dense.hopper_launcher import HopperLauncher
from tests.support.quantized.random_weights import KINDS, RandomWeights

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
BRAIN, CPU = torch.bfloat16, torch.device("cpu")
OUT, IN = 512, 1024  # features
NUM_EXPERTS = 2
FORMATS = ["fp8", "fp8 token", "int4 g32", "int4 g64 zero", "int8", "int8 token", "int8 g32 zero", "mxfp4"]


@pytest.fixture
def launcher() -> HopperLauncher:
    return HopperLauncher()


def operands_of(name: str) -> tuple[InputForm, QuantizedMatrix]:
    make, _ = KINDS[name]
    weight = make(RandomWeights(CPU, BRAIN), (OUT,), IN)
    return OPERANDS[type(weight)].input_form(weight, BRAIN), OPERANDS[type(weight)].matrix(weight)


def prepared_rows(form: InputForm, num_rows: int) -> PreparedInput:
    scale = None if form.element is None else torch.ones(1, num_rows, IN // (form.group_size or IN))
    return PreparedInput(torch.zeros(1, num_rows, IN, dtype=form.dtype), scale)


def check_loops(launcher: HopperLauncher, kernel: str) -> None:
    """Loops whose tensor cores read a factor from registers wait for all of them after the last product."""
    bodies = re.findall(r"scf\.for.*?\n(.*?)scf\.yield", launcher.compiled[kernel].asm["ttgir"], re.DOTALL)
    loops = [re.findall(r"warp_group_dot.*", body) for body in bodies if "warp_group_dot " in body]
    assert loops, "tensor cores multiply in a loop"
    for lines in loops:
        assert any(re.search(r"^warp_group_dot .* : tensor<", line) for line in lines), "one factor is in registers"
        last = max(i for i, line in enumerate(lines) if line.startswith("warp_group_dot "))
        assert any("pendings = 0" in line for line in lines[last:]), lines


@pytest.mark.parametrize("name", ["int4 g32", "int4 g64 zero", "int8", "int8 g32 zero", "mxfp4"])
def test_tiles(launcher: HopperLauncher, name: str) -> None:
    form, matrix = operands_of(name)
    x, out = prepared_rows(form, 256), torch.zeros(256, OUT, dtype=BRAIN)
    multiply_value_tiles(launcher, x, matrix, None, out, BRAIN, SplitWorkspace(CPU, 1), VALUE_TILES[0])
    check_loops(launcher, "_value_tiles_kernel")


@pytest.mark.parametrize("num_rows", [16, 64])
@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", FORMATS)
def test_few_rows(launcher: HopperLauncher, name: str, is_gated: bool, num_rows: int) -> None:
    form, matrix = operands_of(name)
    out = torch.zeros(num_rows, OUT // 2 if is_gated else OUT, dtype=BRAIN)
    activation = MlpActivation(Activation.SILU, True) if is_gated else None
    workspace, x = SplitWorkspace(CPU, 1), prepared_rows(form, num_rows)
    skinny_quantized(launcher, x, matrix, None, out, BRAIN, workspace, activation=activation)
    check_loops(launcher, "_skinny_quantized_kernel")


@pytest.mark.parametrize("num_rows", [16, 64])
@pytest.mark.parametrize("name", FORMATS)
def test_experts(launcher: HopperLauncher, name: str, num_rows: int) -> None:
    form, matrix = operands_of(name)
    blocks = PairBlocks(NUM_EXPERTS, 64, 8, CPU)
    out = torch.zeros(num_rows, OUT // NUM_EXPERTS // 2, dtype=BRAIN)
    grouped_quantized(launcher, prepared_rows(form, num_rows), 1, matrix, None, out, blocks, num_rows, is_gated=True)
    check_loops(launcher, "_grouped_quantized_kernel")
