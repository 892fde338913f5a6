"""The dense stroke's Triton kernels, each against its formula in float64, and `CudaBackend` against the segments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.common.families.shape import Activation
from services.common.model_config import ModelConfig, RopeConfig
from services.dense_worker.backends import InputEmbeds
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import random_weights
from tests.gpu.dense.operands import (
    ACTIVATIONS,
    EPS,
    NORMS,
    SWIGLU,
    TOLERANCES,
    Case,
    exact_activation,
    exact_norm,
    linear,
)

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.backends.cuda_backend import CudaBackend
from services.dense_worker.kernels.linear.linear_choice import LinearChoice, LinearKernel
from services.dense_worker.kernels.linear.quantized.operands import CodeScales
from services.dense_worker.kernels.linear.triton_gated_product import multiply_gated
from services.dense_worker.kernels.linear.triton_gemv import gemv
from services.dense_worker.kernels.linear.triton_skinny import choose_skinny_tiles, skinny_linear
from services.dense_worker.kernels.linear.triton_tiles import SplitWorkspace
from services.dense_worker.kernels.norm.norm import SplitNorm, num_squares
from services.dense_worker.kernels.triton_launch import KernelLauncher

# (out_features, in_features): aligned, with remainders in both, wider than a tile, split along in_features.
SHAPES = [(256, 512), (137, 272), (40, 1500), (6500, 96)]
CODES_TOLERANCE = 6e-3  # the tensor cores round sums of FP8 to about 14 bits on the way


@pytest.mark.parametrize("shape", SHAPES)
def test_gemv_computes_the_linear_layer_and_what_is_fused(
    launcher: KernelLauncher, kernel_device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    case = Case(kernel_device, dtype, 1, shape)
    x, norm = case.x, case.norm("rms")
    normed = exact_norm(x, norm)

    out = case.nan(1, shape[0])
    gemv(launcher, x, case.weight, None, out)
    case.check(out, linear(x, case.weight))

    gemv(launcher, x, case.weight, case.bias, out, norm=norm)
    case.check(out, linear(normed, case.weight, case.bias))

    gemv(launcher, x, case.gate_up, case.gate_up_bias, out, activation=SWIGLU, norm=norm)
    case.check(out, exact_activation(linear(normed, case.gate_up, case.gate_up_bias), SWIGLU))

    residual = case.residual.clone()
    gemv(launcher, x, case.weight, case.bias, residual, residual=residual)
    case.check(residual, linear(x, case.weight, case.bias) + case.residual.double())

    wide = case.nan(1, shape[0], dtype=torch.float32)
    gemv(launcher, x, case.weight, None, wide, norm=norm)
    case.check(wide, linear(normed, case.weight))
    assert torch.equal(wide, wide.to(dtype).float())  # rounded, as the logits of Hugging Face have the model's dtype


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)
def test_gemv_fuses_each_norm_with_each_activation(
    launcher: KernelLauncher,
    kernel_device: torch.device,
    dtype: torch.dtype,
    activation: MlpActivation | None,
    kind: str,
) -> None:
    case = Case(kernel_device, dtype, 1, (137, 272))
    norm, out = case.norm(kind), case.nan(1, 137)
    is_gated = activation is not None and activation.is_gated
    weight, bias = (case.gate_up, case.gate_up_bias) if is_gated else (case.weight, case.bias)
    gemv(launcher, case.x, weight, bias, out, norm=norm, activation=activation)
    product = linear(exact_norm(case.x, norm), weight, bias)
    is_squared = activation is not None and activation.function is Activation.RELU_SQUARED
    least = 2 * TOLERANCES[dtype] if is_squared else 0.0  # a square doubles relative errors
    case.check(out, product if activation is None else exact_activation(product, activation), least)


@pytest.mark.parametrize("num_rows", [2, 16, 23, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_skinny_linear_computes_the_linear_layer_and_what_is_fused(
    launcher: KernelLauncher, kernel_device: torch.device, dtype: torch.dtype, shape: tuple[int, int], num_rows: int
) -> None:
    case = Case(kernel_device, dtype, num_rows, shape)
    splits = SplitWorkspace(kernel_device, launcher.num_sms)
    x = case.x

    wide = case.nan(num_rows, shape[0], dtype=torch.float32)
    skinny_linear(launcher, x, case.weight, None, wide, splits)
    case.check(wide, linear(x, case.weight))
    assert torch.equal(wide, wide.to(dtype).float())

    # As in the backend, the results go to the left half of a wider workspace, from which the next layer reads them.
    workspace = case.nan(num_rows + 1, 2 * shape[0])
    activation = workspace[:num_rows, : shape[0]]
    skinny_linear(launcher, x, case.gate_up, case.gate_up_bias, activation, splits, activation=SWIGLU)
    case.check(activation, exact_activation(linear(x, case.gate_up, case.gate_up_bias), SWIGLU))
    assert workspace[num_rows:].isnan().all() and workspace[:, shape[0] :].isnan().all()

    following = Case(kernel_device, dtype, num_rows, (shape[1], shape[0]))
    residual = following.residual.clone()
    skinny_linear(launcher, activation, following.weight, following.bias, residual, splits, residual=residual)
    case.check(residual, linear(activation, following.weight, following.bias) + following.residual.double())
    assert not splits.num_done.any()


@pytest.mark.parametrize("num_rows", [2, 23, 33])
def test_what_lies_behind_the_rows_of_a_product_does_not_matter(
    launcher: KernelLauncher, kernel_device: torch.device, dtype: torch.dtype, num_rows: int
) -> None:
    """On Hopper it is multiplied, too, as far as the tensor's memory goes: here for a part of a tile."""
    case = Case(kernel_device, dtype, num_rows, (72, 272))
    splits, squares = SplitWorkspace(kernel_device, launcher.num_sms), torch.zeros(64, 64, device=kernel_device)
    workspace = case.nan(num_rows + 5, 400)
    workspace[:num_rows, 64:336] = case.x
    found = []
    for x in (case.x, workspace[:num_rows, 64:336]):
        out = case.residual.clone()
        half = SplitNorm(case.randn(72).abs(), EPS, case.nan(num_rows, 72), squares)
        skinny_linear(launcher, x, case.weight, case.bias, out, splits, residual=out, norm_after=half)
        found.append((out, squares[:num_rows].clone()))
    case.check(found[0][0], linear(case.x, case.weight, case.bias) + case.residual.double())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("num_rows", [2, 16, 23, 64])
@pytest.mark.parametrize("size", [64, 272, 4480])  # the last has more tiles than one of them has features
def test_two_products_compute_the_norm_between_them(
    launcher: KernelLauncher, kernel_device: torch.device, dtype: torch.dtype, size: int, num_rows: int
) -> None:
    """As exactly as with a norm that is rounded twice. On a GPU a row's bits do not depend on the number of rows."""
    before, after = Case(kernel_device, dtype, num_rows, (size, 96)), Case(kernel_device, dtype, num_rows, (137, size))
    splits, norm = SplitWorkspace(kernel_device, launcher.num_sms), after.norm("rms")
    squares = torch.zeros(64, num_squares(size), device=kernel_device)
    residual = before.residual.clone()
    half = SplitNorm(norm.weight.data, norm.eps, before.nan(num_rows, size), squares)
    skinny_linear(launcher, before.x, before.weight, None, residual, splits, residual=residual, norm_after=half)
    before.check(residual, linear(before.x, before.weight) + before.residual.double())
    exact = exact_norm(residual, norm)
    for weight, bias, activation in ((after.weight, after.bias, None), (after.gate_up, after.gate_up_bias, SWIGLU)):
        errors = []
        for x, half_before in ((norm.normalize(residual), None), (half.rows, half)):
            out = after.nan(num_rows, 137)
            skinny_linear(launcher, x, weight, bias, out, splits, activation=activation, norm=half_before)
            expected = linear(exact, weight, bias)
            expected = expected if activation is None else exact_activation(expected, activation)
            errors.append(((out.double() - expected).norm() / expected.norm()).item())
        after.check(out, expected)
        assert errors[1] < 1.02 * errors[0]
        if kernel_device.type == "cuda":
            fewer = after.nan(2, 137)
            skinny_linear(launcher, half.rows[:2], weight, bias, fewer, splits, activation=activation, norm=half)
            assert torch.equal(fewer, out[:2])


@pytest.mark.parametrize("size", [64, 137, 5120])
def test_squares_of_lower_tiles_of_another_product_are_not_added(
    kernel_device: torch.device, dtype: torch.dtype, size: int
) -> None:
    """On Hopper, rows of 97 features cannot be copied ahead, and those of other products can."""
    launcher = KernelLauncher(kernel_device)
    launcher.is_hopper = launcher.is_hopper or kernel_device.type == "cpu"
    before, after = Case(kernel_device, dtype, 3, (size, 97)), Case(kernel_device, dtype, 3, (9, size))
    splits, norm = SplitWorkspace(kernel_device, launcher.num_sms), after.norm("rms")
    squares = torch.zeros(64, num_squares(size), device=kernel_device)
    half = SplitNorm(norm.weight.data, norm.eps, before.nan(3, size), squares)
    if launcher.is_hopper:
        squares[:, : 2 * -(-size // 64)] = 100.0
    residual = before.residual.clone()
    skinny_linear(launcher, before.x, before.weight, None, residual, splits, residual=residual, norm_after=half)
    exact = before.residual.double() + linear(before.x, before.weight)
    found = squares[:3].double().sum(1)
    assert torch.allclose(found, exact.square().sum(1), rtol=0.02), found


@pytest.mark.parametrize(
    ("out_features", "is_gated"),
    [(12288, False), (6144, False), (15360, False), (5120, False), (11008, True), (14336, True), (13824, True)],
)
def test_all_multiprocessors_of_an_h200_read_as_much(out_features: int, is_gated: bool) -> None:
    """Within a twelfth, and all tiles run at once. Products of Llama 2 7B and 13B and Llama 3 8B."""
    for num_rows in (16, 32, 64):
        tiles = choose_skinny_tiles(num_rows, out_features, is_gated, 132, is_ahead=True)
        num_tiles, rest = divmod(out_features, tiles.height)
        assert not rest and num_tiles <= 2 * 132 and tiles.num_stages >= 2
        assert -(-num_tiles // 132) * tiles.height < 13 / 12 * out_features / 132


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 23, 64])
@pytest.mark.parametrize(("out_features", "is_gated"), [(12288, False), (5120, False), (11008, True)])
def test_tiles_of_other_heights_give_the_same_products(
    launcher: KernelLauncher, kernel_device: torch.device, out_features: int, is_gated: bool, num_rows: int
) -> None:
    """Compared with tiles of 64, which a number of features has that no height divides."""
    case = Case(kernel_device, torch.bfloat16, num_rows, (out_features, 272))
    splits, out = SplitWorkspace(kernel_device, launcher.num_sms), case.nan(num_rows, out_features)
    weight, activation = (case.gate_up, SWIGLU) if is_gated else (case.weight, None)
    skinny_linear(launcher, case.x, weight, None, out, splits, activation=activation)
    exact = linear(case.x, weight)
    case.check(out, exact if activation is None else exact_activation(exact, activation))
    height = choose_skinny_tiles(num_rows, out_features, is_gated, launcher.num_sms, is_ahead=True).height
    size = 60 * height + 1  # which no height divides
    part = case.nan(num_rows, size)
    rows = weight.unflatten(0, (-1, out_features))[:, -size:].flatten(0, 1)
    skinny_linear(launcher, case.x, rows, None, part, splits, activation=activation)
    if is_gated:
        assert torch.equal(part, out[:, -size:])
    else:  # the smaller product is split
        case.check(part, out[:, -size:].double())


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_skinny_linear_fuses_each_activation(
    launcher: KernelLauncher, kernel_device: torch.device, dtype: torch.dtype, activation: MlpActivation
) -> None:
    """Also where the product is split: those without a gate."""
    case = Case(kernel_device, dtype, 5, (137, 600))
    splits, out = SplitWorkspace(kernel_device, launcher.num_sms), case.nan(5, 137)
    weight, bias = (case.gate_up, case.gate_up_bias) if activation.is_gated else (case.weight, case.bias)
    skinny_linear(launcher, case.x, weight, bias, out, splits, activation=activation)
    case.check(out, exact_activation(linear(case.x, weight, bias), activation))


@pytest.mark.parametrize(
    ("num_rows", "shape"), [(1, (256, 512)), (300, (136, 272)), (130, (40, 1496)), (1100, (128, 64))]
)
def test_gated_product_computes_the_activation_of_all_rows(
    launcher: KernelLauncher,
    kernel_device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int],
    num_rows: int,
) -> None:
    """Tiles that end beyond rows, features and columns, and a last group of tiles that is not full."""
    case = Case(kernel_device, dtype, num_rows, shape)
    workspace = case.nan(num_rows + 1, 2 * shape[0])
    out = workspace[:num_rows, : shape[0]]  # as in the backend
    multiply_gated(launcher, case.x, case.gate_up, out, SWIGLU)
    case.check(out, exact_activation(linear(case.x, case.gate_up), SWIGLU))
    assert workspace[num_rows:].isnan().all() and workspace[:, shape[0] :].isnan().all()


@pytest.mark.parametrize("activation", [each for each in ACTIVATIONS if each.is_gated], ids=str)
def test_gated_product_has_each_activation(
    launcher: KernelLauncher, kernel_device: torch.device, dtype: torch.dtype, activation: MlpActivation
) -> None:
    case = Case(kernel_device, dtype, 7, (136, 64))
    out = case.nan(7, 136)
    multiply_gated(launcher, case.x, case.gate_up, out, activation)
    case.check(out, exact_activation(linear(case.x, case.gate_up), activation))


@pytest.mark.parametrize("num_rows", [3, 64])
@pytest.mark.parametrize("shape", [(256, 1024), (137, 272)])
@pytest.mark.parametrize("element", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_skinny_linear_multiplies_codes(
    launcher: KernelLauncher,
    kernel_device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int],
    num_rows: int,
    element: torch.dtype,
) -> None:
    """Of random bytes but NaN; the scales are applied to the sums."""
    case = Case(kernel_device, dtype, num_rows, shape)
    splits = SplitWorkspace(kernel_device, launcher.num_sms)

    def codes(*size: int) -> torch.Tensor:
        octets = torch.randint(0, 0x7F, size) + 0x80 * torch.randint(0, 2, size)
        return octets.to(torch.uint8).to(kernel_device).view(element)

    x, gate_up, bias = codes(num_rows, shape[1]), codes(2 * shape[0], shape[1]), case.gate_up_bias
    of_rows, of_weights = torch.rand(num_rows) * 1e-4, torch.rand(2 * shape[0])
    scales = CodeScales(of_rows.to(kernel_device), of_weights.to(kernel_device), dtype)
    product = linear(x.double() * scales.rows[:, None], gate_up.double() * scales.weights[:, None], bias)

    gated = case.nan(num_rows, shape[0])
    skinny_linear(launcher, x, gate_up, bias, gated, splits, scales=scales, activation=SWIGLU)
    case.check(gated, exact_activation(product, SWIGLU), CODES_TOLERANCE)

    residual = case.residual.clone()
    of_half = CodeScales(scales.rows, scales.weights[: shape[0]], dtype)
    half = gate_up[: shape[0]], bias[: shape[0]]
    skinny_linear(launcher, x, *half, residual, splits, scales=of_half, residual=residual)
    case.check(residual, product[:, : shape[0]] + case.residual.double(), CODES_TOLERANCE)
    assert not splits.num_done.any()


LLAMA = ModelConfig(
    family="llama",
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=336,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    norm_eps=EPS,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_windows=(None,) * 3,
    max_position_embeddings=64,
    rope=RopeConfig("default", 10000.0, 32, 64),
    eos_token_ids=(),
    checkpoint_dtype="float32",
)
VARIANTS = {
    "llama": LLAMA,
    "biases": replace(LLAMA, qkv_bias=True, o_bias=True, mlp_bias=True, num_layers=1),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, tie_word_embeddings=True),
}
MAX_NUM_TOKENS = 100


def make_weights(config: ModelConfig, dtype: torch.dtype) -> ModelWeights:
    """All weights are random, biases and norms too, so that a forgotten one changes the result."""
    weights = random_weights(config, dtype, torch.device("cuda"), seed=0)
    for name, tensor in weights.named_tensors():
        tensor.normal_(mean=1.0 if name.endswith("norm") else 0.0, std=0.2 if tensor.dim() == 1 else 0.1)
    return weights


def to_float32(weights: ModelWeights, config: ModelConfig) -> ModelWeights:
    wide = random_weights(config, torch.float32, torch.device("cuda"), seed=0)
    for (_, target), (_, source) in zip(wide.named_tensors(), weights.named_tensors(), strict=True):
        target.copy_(source)
    return wide


class Step:
    """A step of `num_tokens` tokens. Instead of attention it applies a fixed function to each layer's qkv."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, num_tokens: int, rows: list[int]) -> None:
        self.config = config
        self.token_ids = torch.randint(config.vocab_size, (num_tokens,), device="cuda")
        self.qkv = torch.full((num_tokens, config.qkv_size), torch.nan, dtype=dtype, device="cuda")
        self.attn_out = torch.full((num_tokens, config.attn_size), torch.nan, dtype=dtype, device="cuda")
        self.rows = torch.tensor(rows, dtype=torch.int64, device="cuda")
        self.input_embeds: InputEmbeds | None = None

    def run(self, backend: CudaBackend | TorchBackend) -> torch.Tensor:
        residual = backend.first(self.token_ids, self.qkv, self.input_embeds)
        for layer in range(self.config.num_layers):
            torch.tanh(self.qkv[:, -self.config.attn_size :], out=self.attn_out)
            if layer + 1 < self.config.num_layers:
                residual = backend.middle(layer, self.attn_out, residual, self.qkv)
        return backend.last(self.attn_out, residual, self.rows)


@pytest.fixture(params=[LinearKernel.CUBLAS, LinearKernel.STREAMED], ids=lambda kernel: kernel.value)
def only_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LinearKernel]:
    """Makes all layers use this kernel, whatever the measurement says."""
    measure = LinearChoice.measure

    def measure_and_override(self: LinearChoice, linears: list[Linear], *arguments: Any) -> None:
        measure(self, linears, *arguments)
        self.set_all(linears, request.param)

    monkeypatch.setattr(LinearChoice, "measure", measure_and_override)
    return request.param


@pytest.mark.gpu
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_backend_is_as_exact_as_the_segments(variant: str, half: torch.dtype, only_kernel: LinearKernel) -> None:
    config = VARIANTS[variant]
    weights = make_weights(config, half)
    backend, reference = CudaBackend(weights, config, MAX_NUM_TOKENS), TorchBackend(weights)
    exact = TorchBackend(to_float32(weights, config))
    for num_tokens, rows in ((1, [0]), (5, [4, 1, 1]), (31, [30]), (64, list(range(64))), (MAX_NUM_TOKENS, [7, 99])):
        step = Step(config, half, num_tokens, rows)
        wide_step = Step(config, torch.float32, num_tokens, rows)
        wide_step.token_ids.copy_(step.token_ids)
        expected = wide_step.run(exact)
        reference_error = (step.run(reference) - expected).square().mean().sqrt().item()
        found = step.run(backend)
        assert found.dtype == backend.logits_dtype == half  # rounded, as those of Hugging Face
        # Both round at the same places but sum in different orders, which changes last bits: either may be closer.
        assert (found - expected).square().mean().sqrt().item() <= 2 * reference_error


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_backend_in_float32_equals_the_segments(variant: str) -> None:
    config = VARIANTS[variant]
    weights = make_weights(config, torch.float32)
    backend, reference = CudaBackend(weights, config, MAX_NUM_TOKENS), TorchBackend(weights)
    for num_tokens, rows in ((1, [0]), (5, [4, 1, 1]), (MAX_NUM_TOKENS, [7, 99]), (3, [])):
        step = Step(config, torch.float32, num_tokens, rows)
        expected = step.run(reference)
        torch.testing.assert_close(step.run(backend), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8, 64, MAX_NUM_TOKENS])
def test_captured_step_gives_the_same_logits_for_new_tokens(num_tokens: int, only_kernel: LinearKernel) -> None:
    weights = make_weights(LLAMA, torch.bfloat16)
    backend = CudaBackend(weights, LLAMA, MAX_NUM_TOKENS)
    step = Step(LLAMA, torch.bfloat16, num_tokens, list(range(num_tokens)))
    step.run(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step.run(backend)
    for _ in range(3):
        step.token_ids.copy_(torch.randint(LLAMA.vocab_size, (num_tokens,), device="cuda"))
        expected = step.run(backend)
        logits.fill_(torch.nan)
        graph.replay()
        assert torch.equal(logits, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8, MAX_NUM_TOKENS])
def test_given_vectors_take_the_place_of_embeddings(num_tokens: int) -> None:
    """Those of other tokens give the logits of these tokens, and leave the other rows as they are."""
    weights = make_weights(LLAMA, torch.bfloat16)
    backend = CudaBackend(weights, LLAMA, MAX_NUM_TOKENS)
    step = Step(LLAMA, torch.bfloat16, num_tokens, list(range(num_tokens)))
    expected = step.run(backend)
    places = torch.arange(0, num_tokens, 2)
    table = dict(weights.named_tensors())["embed"]
    step.input_embeds = InputEmbeds(places, table[step.token_ids[::2]].cpu()).upload(table.device)
    step.token_ids[::2] = 0
    assert torch.equal(step.run(backend), expected)
    step.input_embeds = None
    assert not torch.equal(step.run(backend), expected)


@pytest.mark.gpu
def test_a_step_neither_waits_nor_writes_weights() -> None:
    config = VARIANTS["qwen3"]
    weights = make_weights(config, torch.bfloat16)
    copies = [tensor.clone() for _, tensor in weights.named_tensors()]
    backend = CudaBackend(weights, config, MAX_NUM_TOKENS)
    steps = [Step(config, torch.bfloat16, n, list(range(n))) for n in (1, 7, MAX_NUM_TOKENS)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in steps:
            step.run(backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(tensor, copy) for (_, tensor), copy in zip(weights.named_tensors(), copies, strict=True))
