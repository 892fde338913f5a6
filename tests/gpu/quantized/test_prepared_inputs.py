"""Norm and SiLU in the kernel that prepares the input of a quantized product, against torch and the kernels alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from services.common.families.shape import Activation
from services.common.quantization.schemes import Element
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.quantized.activations import rounded, rounded_by_groups, to_codes, token_scale
from services.dense_worker.kernels.norm.norm import RmsNorm
from services.dense_worker.parameters import Parameter

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.kernels.linear.quantized.operands import InputForm, PreparedInput
from services.dense_worker.kernels.linear.quantized.triton_prepare import prepare_input
from services.dense_worker.kernels.linear.quantized.triton_token_codes import can_quantize
from services.dense_worker.kernels.linear.triton_activation import activate
from services.dense_worker.kernels.norm.triton_norm import add_norm
from services.dense_worker.kernels.triton_launch import KernelLauncher

FP8, INT8 = Element.FP8, Element.INT8
EPS = 1e-5
SWIGLU = MlpActivation(Activation.SILU, is_gated=True)
NUM_ROWS, WIDTH = 5, 320
# ‖found − reference‖ / ‖reference‖: a norm or an activation that is rounded otherwise may give a neighbouring code.
# Triton's interpreter, moreover, cuts e4m3 off: the last bit is 2^-3 of a number.
OTHER_CODE, CUT_OFF = 2e-2, 0.13
FORMS: dict[str, dict[str, Any]] = {
    "fp8 token": {"dtype": torch.float8_e4m3fn, "element": FP8},
    "fp8 token, limited": {"dtype": torch.float8_e4m3fn, "element": FP8, "max_activation": 1.25},
    "fp8 token as float16": {"dtype": torch.float16, "element": FP8},
    "int8 token": {"dtype": torch.int8, "element": INT8},
    "fp8 static, three": {"dtype": torch.float8_e4m3fn, "element": FP8, "num_versions": 3},
    "fp8 blocks as float16": {"dtype": torch.float16, "element": FP8, "group_size": 128},
    "fp8 blocks as numbers": {"dtype": None, "element": FP8, "group_size": 128, "is_dequantized": True},
    "split": {"dtype": None, "is_split": True},
}


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest, kernel_device: torch.device) -> torch.dtype:
    if kernel_device.type == "cpu" and request.param == torch.bfloat16:
        pytest.skip("Triton's interpreter does not round bfloat16")
    if kernel_device.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the kernels of quantized layers need compute capability 9.0")
    return request.param


class Rows:
    """Random rows with features of different sizes, and forms of them."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._device, self._dtype = device, dtype
        self.launcher = KernelLauncher(device)

    def randn(self, *shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=self._generator) * torch.linspace(0.1, 3, shape[-1])
        return values.to(self._device, self._dtype)

    def norm(self) -> RmsNorm:
        return RmsNorm(Parameter("norm", 1 + 0.1 * self.randn(WIDTH), ()), EPS)

    def form(self, name: str) -> InputForm:
        fields = dict(FORMS[name])
        dtype, num_versions = fields.pop("dtype") or self._dtype, fields.get("num_versions", 1)
        if num_versions > 1:
            fields["input_scale"] = torch.tensor([0.002, 0.006, 0.02], device=self._device)
        return InputForm(dtype, **fields)


def expected_numbers(form: InputForm, values: torch.Tensor) -> list[torch.Tensor]:
    """What each version stands for, by the reference of the quantization."""
    if form.is_split:
        return [torch.cat([values[:, 0::2], values[:, 1::2]], dim=1)]
    if form.group_size is not None:
        return [rounded_by_groups(values, form.group_size)]
    if form.input_scale is not None:
        return [rounded(values, scale, form.element) for scale in form.input_scale]
    return [rounded(values, token_scale(values, form.element, form.max_activation), form.element)]


def check(found: PreparedInput, form: InputForm, values: torch.Tensor) -> None:
    expected = expected_numbers(form, values)
    assert len(found.values) == len(expected)
    for version, numbers in enumerate(expected):
        result = found.values[version].float()
        if found.scale is not None and not form.is_dequantized:
            scale = found.scale[version]
            result = result * scale.repeat_interleave(form.group_size or WIDTH, dim=1)[:, :WIDTH]
        allowed = CUT_OFF if form.element is FP8 and values.device.type == "cpu" else OTHER_CODE
        assert ((result - numbers.float()).norm() / numbers.float().norm()).item() < allowed


def check_equal(found: PreparedInput, alone: PreparedInput) -> None:
    assert torch.equal(found.values.view(torch.uint8), alone.values.view(torch.uint8))
    if alone.scale is None:
        assert found.scale is None
    else:
        assert torch.equal(found.scale, alone.scale)


@pytest.mark.parametrize("name", FORMS)
def test_the_residual_is_added_and_normalised(kernel_device: torch.device, dtype: torch.dtype, name: str) -> None:
    rows = Rows(kernel_device, dtype)
    residual, delta, norm, form = rows.randn(NUM_ROWS, WIDTH), rows.randn(NUM_ROWS, WIDTH), rows.norm(), rows.form(name)
    added = (residual.float() + delta.float()).to(dtype)
    by_itself, normed = residual.clone(), torch.empty_like(residual)

    found = prepare_input(rows.launcher, residual, form, norm, delta=delta)
    assert torch.equal(residual, added)
    check(found, form, norm.normalize(added))
    add_norm(rows.launcher, by_itself, delta, norm, normed)
    if can_quantize(form):  # whose kernel adds the squares up in another order
        check(found, form, normed)
    else:
        check_equal(found, prepare_input(rows.launcher, normed, form))

    check_equal(prepare_input(rows.launcher, added, form, norm), found)
    assert torch.equal(residual, added), "nothing is added without a delta"


@pytest.mark.parametrize("function", [each for each in Activation if each is not Activation.XIELU])  # it has numbers
@pytest.mark.parametrize("name", FORMS)
def test_the_activation_comes_before_the_form(
    kernel_device: torch.device, dtype: torch.dtype, name: str, function: Activation
) -> None:
    rows = Rows(kernel_device, dtype)
    both, form = rows.randn(NUM_ROWS, 2 * WIDTH + 64)[:, : 2 * WIDTH], rows.form(name)  # as in a wider workspace
    before = both.clone()

    for is_gated in (True, False):
        activation = MlpActivation(function, is_gated)
        x = both if is_gated else both[:, :WIDTH]
        found = prepare_input(rows.launcher, x, form, activation=activation)
        assert torch.equal(both, before)
        check(found, form, activation.apply(x))
        by_itself = torch.empty(NUM_ROWS, WIDTH, dtype=dtype, device=kernel_device)
        activate(rows.launcher, x, by_itself, activation)
        check_equal(found, prepare_input(rows.launcher, by_itself, form))


@pytest.mark.parametrize("width", [16, 48, 320, 704, 1024, 1728])  # of one to three pieces, the last one full or not
@pytest.mark.parametrize("name", ["fp8 token", "fp8 token, limited", "int8 token"])
def test_codes_and_scales_of_rows_are_those_of_the_reference(
    kernel_device: torch.device, dtype: torch.dtype, name: str, width: int
) -> None:
    rows = Rows(kernel_device, dtype)
    values, form = rows.randn(NUM_ROWS, width), rows.form(name)
    values[0] = 0
    values[1, width // 2] = float("nan")
    found = prepare_input(rows.launcher, values, form)
    # On a GPU torch multiplies by the reciprocal of a number: the quotients are those of the CPU.
    scale = token_scale(values.cpu(), form.element, form.max_activation).to(kernel_device)
    assert torch.equal(found.scale[0].nan_to_num(7.0), scale.nan_to_num(7.0)) and scale[1].isnan().all()
    others = [row for row in range(NUM_ROWS) if row != 1]
    difference = found.values[0][others].float() - to_codes(values[others], scale[others], form.element).float()
    if kernel_device.type == "cpu" and form.element is FP8:  # the interpreter cuts e4m3 off
        assert (difference.norm() / found.values[0][others].float().norm()) < CUT_OFF
    else:
        assert not difference.any()


@pytest.mark.parametrize("width", [16, 704, 1728])
def test_a_token_gets_the_same_codes_whatever_the_number_of_rows(
    kernel_device: torch.device, dtype: torch.dtype, width: int
) -> None:
    rows = Rows(kernel_device, dtype)
    residual, norm = rows.randn(300, width), RmsNorm(Parameter("norm", 1 + 0.1 * rows.randn(width), ()), EPS)
    form = rows.form("fp8 token")
    few, many = (prepare_input(rows.launcher, residual[:num].clone(), form, norm) for num in (3, 300))
    assert torch.equal(few.values[0].view(torch.uint8), many.values[0][:3].view(torch.uint8))
    assert torch.equal(few.scale[0], many.scale[0][:3])


def test_each_order_of_features_has_a_version(kernel_device: torch.device, dtype: torch.dtype) -> None:
    """Act-order: the norm and SiLU come before the order."""
    rows = Rows(kernel_device, dtype)
    both, norm = rows.randn(NUM_ROWS, 2 * WIDTH), rows.norm()
    orders = torch.stack([torch.randperm(WIDTH) for _ in range(2)]).to(kernel_device, torch.int32)
    form = InputForm(dtype, num_versions=2, order=orders)
    gate, up = both.chunk(2, dim=1)
    activated = prepare_input(rows.launcher, both, form, activation=SWIGLU).values.float()
    normed = prepare_input(rows.launcher, gate, form, norm).values.float()
    for version, order in enumerate(orders.long()):
        expected = (F.silu(gate) * up)[:, order].float()
        assert (activated[version] - expected).norm() / expected.norm() < OTHER_CODE
        expected = norm.normalize(gate)[:, order].float()
        assert (normed[version] - expected).norm() / expected.norm() < OTHER_CODE
