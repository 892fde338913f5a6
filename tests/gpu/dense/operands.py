"""Random operands of the dense stroke's kernels, and their formulas in float64."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from services.common.families.shape import Activation
from services.dense_worker.kernels.linear.activation import ACTIVATIONS as FUNCTIONS
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Linear, PlainWeight
from services.dense_worker.kernels.norm.norm import LayerNorm, Norm, RmsNorm, RmsNormPlusOne
from services.dense_worker.model.segments import Middle
from services.dense_worker.parameters import Parameter

EPS = 1e-5
# ‖out − exact‖ / ‖exact‖. Inputs and each operator's result are rounded to 2^-9 (bfloat16) or 2^-12 (float16),
# at most four times in a row.
TOLERANCES = {torch.bfloat16: 6e-3, torch.float16: 8e-4}
ACTIVATIONS = [MlpActivation(function, is_gated) for function in FUNCTIONS for is_gated in (True, False)]
SWIGLU = MlpActivation(Activation.SILU, is_gated=True)
NORMS = ["rms", "rms_plus_one", "layer", "layer_no_bias"]


class Case:
    """Random operands of one linear layer; `exact` computes in float64 what the kernels fuse."""

    def __init__(self, device: torch.device, dtype: torch.dtype, num_rows: int, shape: tuple[int, int]) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(0)  # fixed, as some seeds come close to the tolerance
        out_features, in_features = shape
        self.x = self.randn(num_rows, in_features)
        self.weight = self.randn(out_features, in_features) * in_features**-0.5
        self.gate_up = self.randn(2 * out_features, in_features) * in_features**-0.5
        self.bias, self.gate_up_bias = self.randn(out_features), self.randn(2 * out_features)
        self.norm_weight = 1 + 0.2 * self.randn(in_features)
        self.residual = self.randn(num_rows, out_features)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, self.dtype)

    def nan(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype or self.dtype, device=self.device)

    def check(self, found: torch.Tensor, exact: torch.Tensor, least: float = 0.0) -> None:
        """`least`: of tolerances"""
        error = ((found.double() - exact).norm() / exact.norm()).item()
        assert error < max(TOLERANCES[self.dtype], least), error

    def norm(self, kind: str) -> Norm:
        """A norm over the features of x, with a random weight."""
        if kind == "rms":
            return RmsNorm(Parameter("norm", self.norm_weight), EPS)
        if kind == "rms_plus_one":
            return RmsNormPlusOne(Parameter("norm", self.norm_weight - 1), EPS)
        bias = Parameter("bias", self.randn(len(self.norm_weight))) if kind == "layer" else None
        return LayerNorm(Parameter("norm", self.norm_weight), bias, EPS)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


def exact_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The norm's formula in float64."""
    x, weight = x.double(), norm.weight.data.double()
    if isinstance(norm, LayerNorm):
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
        return normed if norm.bias is None else normed + norm.bias.data.double()
    return rms_norm(x, weight + isinstance(norm, RmsNormPlusOne))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def exact_activation(x: torch.Tensor, activation: MlpActivation) -> torch.Tensor:
    """The formula in float64: arXiv:1606.08415 for the forms of GELU."""
    gate, up = x.double().chunk(2, dim=1) if activation.is_gated else (x.double(), 1.0)
    if activation.function is Activation.SILU:
        return gate / (1 + torch.exp(-gate)) * up
    if activation.function is Activation.RELU:
        return gate.clamp(min=0) * up
    if activation.function is Activation.RELU_SQUARED:
        return gate.clamp(min=0) ** 2 * up
    if activation.function is Activation.QUICK_GELU:
        return gate / (1 + torch.exp(-1.702 * gate)) * up
    if activation.function is Activation.GELU:
        return gate * torch.distributions.Normal(0.0, 1.0).cdf(gate) * up
    return 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up


def exact_stroke(segment: Middle, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A segment of Llama's: qkv and the residual."""
    mlp = segment.after.mlp
    residual = residual.double() + F.linear(x.double(), _matrix(segment.after.o))
    gate, up = F.linear(rms_norm(residual, mlp.norm.weight.data), _matrix(mlp.first)).chunk(2, dim=1)
    residual = residual + F.linear(F.silu(gate) * up, _matrix(mlp.down))
    return F.linear(rms_norm(residual, segment.before.norm.weight.data), _matrix(segment.before.qkv)), residual


def _matrix(linear: Linear) -> torch.Tensor:
    weight = linear.weight
    if isinstance(weight, PlainWeight):
        return weight.matrix.data.double()
    return weight.matrix.data.double() * weight.scale.data.double()[:, None]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()
