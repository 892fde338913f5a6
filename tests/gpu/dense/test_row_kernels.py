"""The kernels that compute rows: norms with what is added before them, activations and gates, by their formulas."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.norm.norm import (
    HeadNorms,
    LayerNorm,
    Norm,
    RmsNorm,
    RmsNormPlusOne,
    UnweightedRmsNorm,
)
from services.dense_worker.parameters import Parameter
from tests.gpu.dense.operands import ACTIVATIONS, EPS, NORMS, Case, exact_activation, exact_norm, rms_norm

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.kernels.linear.triton_activation import activate
from services.dense_worker.kernels.norm.triton_gate import apply_gate
from services.dense_worker.kernels.norm.triton_norm import add_norm, normalize_heads
from services.dense_worker.kernels.triton_launch import KernelLauncher


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("hidden_size", [64, 1000, 4096])
def test_norm_adds_to_the_residual_first(
    launcher: KernelLauncher, kernel_device: torch.device, dtype: torch.dtype, hidden_size: int, kind: str
) -> None:
    case = Case(kernel_device, dtype, 5, (hidden_size, hidden_size))
    x, delta, out, norm = case.residual, case.x, case.nan(5, hidden_size), case.norm(kind)
    add_norm(launcher, x, None, norm, out)
    case.check(out, exact_norm(x, norm))

    added = x + delta
    exact = exact_norm(added, norm)
    add_norm(launcher, x, delta, norm, delta)  # in place
    assert torch.equal(x, added)
    case.check(delta, exact)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("multiplier", [1.0, 0.37])
@pytest.mark.parametrize("hidden_size", [64, 1000, 2560])
def test_what_is_added_is_normalised_and_multiplied_before(
    launcher: KernelLauncher,
    kernel_device: torch.device,
    dtype: torch.dtype,
    hidden_size: int,
    multiplier: float,
    kind: str,
) -> None:
    """The two norms of a row are of one kind, with weights of their own."""
    case = Case(kernel_device, dtype, 5, (hidden_size, hidden_size))
    after, before = case.norm(kind), Case(kernel_device, dtype, 5, (8, hidden_size)).norm(kind)
    exact = case.residual.double() + multiplier * exact_norm(case.x, after)
    x, delta = case.residual.clone(), case.x.clone()
    add_norm(launcher, x, delta, None, None, delta_norm=after, multiplier=multiplier)
    case.check(x, exact)
    assert torch.equal(delta, case.x)

    again = case.residual.clone()
    add_norm(launcher, again, delta, before, delta, delta_norm=after, multiplier=multiplier)  # in place
    assert torch.equal(again, x)
    case.check(delta, exact_norm(x, before))

    unnormed = case.residual.clone()
    add_norm(launcher, unnormed, case.x, None, None, multiplier=multiplier)
    case.check(unnormed, case.residual.double() + multiplier * case.x.double())


@pytest.mark.parametrize("kind", ["rms", "rms_plus_one", "layer_no_bias"])
@pytest.mark.parametrize("normed", ["qk", "qkv", "q"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "have_own_weights"),
    [(4, 2, 16, False), (7, 1, 80, True), (32, 8, 128, False), (8, 4, 256, False), (3, 1, 1000, True)],
)
def test_heads_are_normalised_one_by_one(
    launcher: KernelLauncher,
    kernel_device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    have_own_weights: bool,
    normed: str,
    kind: str,
) -> None:
    """Heads without a norm stay as they are: those of v, and those of k in layers that have none of their own."""
    if "v" in normed and kind == "layer_no_bias":
        pytest.skip("no family has such norms")
    case = Case(kernel_device, dtype, 3, (head_dim, head_dim))
    counts = (num_heads, num_kv_heads if "k" in normed else 0)

    def norm(count: int) -> Norm:
        weight = 1 + 0.2 * case.randn(*((count, head_dim) if have_own_weights else (head_dim,)))
        if kind == "layer_no_bias":
            return LayerNorm(Parameter("norm", weight), None, EPS)
        return (RmsNorm if kind == "rms" else RmsNormPlusOne)(Parameter("norm", weight), EPS)

    q, k = norm(num_heads), norm(num_kv_heads) if "k" in normed else None
    v = UnweightedRmsNorm(EPS) if "v" in normed else None
    sizes = [counts[0] * head_dim, counts[1] * head_dim, counts[1] * head_dim]
    wide = case.randn(3, sum(sizes) + 24)  # rows of the longest layer: this one's are shorter
    qkv, before = wide[:, : sum(sizes)], wide.clone()
    normalize_heads(launcher, qkv, HeadNorms(q, k, num_heads, num_kv_heads, v))
    found, heads = qkv.unflatten(1, (-1, head_dim)), before[:, : sum(sizes)].unflatten(1, (-1, head_dim))
    num_normed = sum(counts)
    case.check(found[:, :num_heads], exact_norm(heads[:, :num_heads], q))
    if k is not None:
        case.check(found[:, num_heads:num_normed], exact_norm(heads[:, num_heads:num_normed], k))
    if v is None:
        assert torch.equal(found[:, num_normed:], heads[:, num_normed:])
    else:
        case.check(found[:, num_normed:], rms_norm(heads[:, num_normed:], torch.ones(1, device=kernel_device)))
    assert torch.equal(wide[:, sum(sizes) :], before[:, sum(sizes) :])


@pytest.mark.parametrize("num_rows", [64, 65, 300])
def test_heads_have_equal_bits_in_steps_of_any_size(
    launcher: KernelLauncher, kernel_device: torch.device, dtype: torch.dtype, num_rows: int
) -> None:
    """Also where a program has two rows, and the last one has one; what lies behind the rows stays."""
    case = Case(kernel_device, dtype, num_rows + 1, (128, 128))
    norm = RmsNorm(Parameter("norm", case.norm_weight), EPS)
    norms = HeadNorms(norm, norm, 5, 3)
    qkv = case.randn(num_rows + 1, 11 * 128)
    together, single = qkv.clone(), qkv.clone()
    normalize_heads(launcher, together[:num_rows], norms)
    for row in (0, 1, num_rows - 2, num_rows - 1):
        normalize_heads(launcher, single[row : row + 1], norms)
        assert torch.equal(together[row], single[row])
    heads = qkv[:num_rows].unflatten(1, (-1, 128))[:, :8]
    case.check(together[:num_rows].unflatten(1, (-1, 128))[:, :8], rms_norm(heads, case.norm_weight))
    assert torch.equal(together[num_rows], qkv[num_rows])


@pytest.mark.parametrize(("num_heads", "head_dim"), [(4, 12), (32, 128), (5, 100), (3, 2048)])
def test_gates_multiply_values_or_normalised_heads(
    launcher: KernelLauncher, kernel_device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int
) -> None:
    case, size = Case(kernel_device, dtype, 3, (8, head_dim)), num_heads * head_dim
    x, gate, out = case.randn(3, size), 4 * case.randn(3, 7 + size)[:, 7:], case.nan(3, size)
    apply_gate(launcher, x, gate, None, 0.0, out)
    case.check(out, x.double() * gate.double().sigmoid())
    apply_gate(launcher, x, gate, case.norm_weight, EPS, out)
    normed = rms_norm(x.view(3, num_heads, head_dim), case.norm_weight).view(3, size)
    case.check(out, normed * F.silu(gate.double()))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda each: f"{each.function}-{each.is_gated}")
@pytest.mark.parametrize("size", [96, 1024, 2500])
def test_activation_may_overwrite_its_input(
    launcher: KernelLauncher,
    kernel_device: torch.device,
    dtype: torch.dtype,
    size: int,
    activation: MlpActivation,
) -> None:
    case = Case(kernel_device, dtype, 5, (size, 8))
    x = 3 * case.randn(5, 2 * size if activation.is_gated else size)
    x[0, :4] = torch.tensor([0.0, -50.0, 50.0, -0.0])
    exact, up = exact_activation(x, activation), x[:, size:].clone()
    out = case.nan(5, size)
    activate(launcher, x, out, activation)
    case.check(out, exact)
    activate(launcher, x, x[:, :size], activation)
    assert torch.equal(x[:, :size], out) and torch.equal(x[:, size:], up)
