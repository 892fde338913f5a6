"""Computes the dense worker's Triton kernels by torch on a CPU, without triton, and records each launch.

These functions replace modules of kernels. So `CudaBackend` itself runs everywhere, and a test can read which kernels a
step launches, in which order, and the shapes of their results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.quantized.operands import CodeScales
from services.dense_worker.kernels.norm.norm import HeadNorms, Norm, SplitNorm
from tests.support.dense.fake_expert_kernels import expert_kernels
from tests.support.dense.fake_quantized_kernels import (
    can_dequantize,
    can_gemv,
    dequantize,
    gemv_quantized,
    multiply_tiles,
    prepare_input,
    skinny_quantized,
)

# What imports kernels, and is imported anew with those that replace them.
USERS = (
    "services.dense_worker.backends.cuda_backend",
    "services.dense_worker.backends.cuda_linear",
    "services.dense_worker.backends.cuda_operations",
    "services.dense_worker.batch_invariant.cuda_linear",
    "services.dense_worker.ranks.sharded_cuda_operations",
    "services.dense_worker.kernels.experts.cuda_experts",
    "services.dense_worker.kernels.linear.quantized.scaled_matmul",
    "services.dense_worker.kernels.linear.quantized.tiled_matmul",
    "services.dense_worker.kernels.linear.quantized.dequantized_matmul",
    "services.dense_worker.kernels.linear.quantized.quantized_gemv",
    "services.dense_worker.kernels.linear.plain_gemv",
    "services.dense_worker.kernels.linear.gated_product",
)
# The operations of torch that launch a kernel. Views and allocations do not.
TORCH_KERNELS = ("mm", "addmm", "linear", "index_select", "index", "embedding", "copy_", "_to_copy")
TORCH_KERNELS += ("add", "add_", "mul", "silu", "cat", "fill_", "zero_")
SAME_KERNELS = {"index": "index_select"}  # rows are copied by either, see `cuda_operations`
NUM_SMS = 8
SHARED_MEMORY_BYTES = 1 << 20
Tensor = torch.Tensor


class LaunchRecorder(TorchDispatchMode):
    """A context in which `launches` gets a line for each kernel: name, fused operands, and shape of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self._is_own = False

    @contextmanager
    def own(self, name: str, out: Tensor, **fused: object) -> Iterator[None]:
        """Records the launch of one of our kernels. The operations of torch that replace it do not count."""
        words = (word for word, operand in fused.items() if operand is not None and operand is not False)
        self.launches.append(" ".join((name, *words, _shape(out))))
        self._is_own = True
        try:
            yield
        finally:
            self._is_own = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not self._is_own and name in TORCH_KERNELS:
            self.launches.append(f"{SAME_KERNELS.get(name, name)} {_shape(result)}")
        return result


@contextmanager
def fake_triton_kernels() -> Iterator[LaunchRecorder]:
    """A context in which `CudaBackend` can be imported, and runs on the device of the weights."""
    recorder = LaunchRecorder()
    modules = _Kernels(recorder).modules()
    names = (*modules, *USERS)
    replaced = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    for name, contents in modules.items():
        sys.modules[name] = module = ModuleType(name)
        vars(module).update(contents)
    try:
        yield recorder
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(replaced)


class _Launcher:
    """Replaces KernelLauncher."""

    num_sms = NUM_SMS
    shared_memory_bytes = SHARED_MEMORY_BYTES
    is_hopper = False

    def __init__(self, device: torch.device) -> None:
        pass

    @contextmanager
    def compiling(self) -> Iterator[None]:
        yield


class _SplitWorkspace:
    """Replaces SplitWorkspace."""

    def __init__(self, device: torch.device, num_programs: int) -> None:
        assert num_programs % NUM_SMS == 0


class _Kernels:
    """The kernels' functions with the signatures of the real ones."""

    def __init__(self, recorder: LaunchRecorder) -> None:
        self._own = recorder.own

    def modules(self) -> dict[str, dict[str, object]]:
        """The names that other modules import from each module of kernels."""
        return {
            "services.dense_worker.kernels.linear.triton_activation": {
                "activate": self.activate,
            },
            "services.dense_worker.kernels.linear.triton_gated_product": {
                "multiply_gated": self.multiply_gated,
            },
            "services.dense_worker.kernels.linear.triton_gemv": {
                "gemv": self.gemv,
            },
            "services.dense_worker.kernels.norm.triton_gate": {
                "apply_gate": self.apply_gate,
            },
            "services.dense_worker.kernels.norm.triton_latent": {
                "place_latent": self.place_latent,
            },
            "services.dense_worker.kernels.triton_launch": {
                "KernelLauncher": _Launcher,
            },
            "services.dense_worker.kernels.norm.triton_norm": {
                "add_norm": self.add_norm,
                "normalize_heads": self.normalize_heads,
            },
            "services.dense_worker.kernels.linear.triton_skinny": {
                "skinny_linear": self.skinny_linear,
            },
            "services.dense_worker.kernels.linear.triton_tiles": {
                "SplitWorkspace": _SplitWorkspace,
                "SPLIT_AREA": 4096,
            },
            "services.dense_worker.batch_invariant.triton_products": {
                "multiply_rows": self.multiply_rows,
                "MOST_SPLIT_SUMS": 4096,
                "ROW_BUCKETS": (16, 64),
            },
            **expert_kernels(self._own),
            "services.dense_worker.kernels.linear.quantized.triton_prepare": {
                "prepare_input": prepare_input,
            },
            "services.dense_worker.kernels.linear.quantized.triton_skinny_quantized": {
                "skinny_quantized": skinny_quantized,
                "PROGRAMS_PER_SM": 1,
            },
            "services.dense_worker.kernels.linear.quantized.triton_gemv_quantized": {
                "can_gemv": can_gemv,
                "gemv_quantized": gemv_quantized,
            },
            "services.dense_worker.kernels.linear.quantized.triton_value_tiles": {
                "multiply_value_tiles": partial(multiply_tiles, self._own),
            },
            "services.dense_worker.kernels.linear.quantized.triton_block_tiles": {
                "multiply_block_tiles": partial(multiply_tiles, self._own),
            },
            "services.dense_worker.kernels.linear.quantized.triton_dequantize": {
                "can_dequantize": can_dequantize,
                "dequantize": dequantize,
            },
        }

    def add_norm(
        self,
        launcher: _Launcher,
        residual: Tensor,
        delta: Tensor | None,
        norm: Norm | None,
        out: Tensor | None,
        *,
        delta_norm: Norm | None = None,
        multiplier: float = 1.0,
    ) -> None:
        fused = {"norm": norm, "add": delta, "normed": delta_norm, "multiplied": multiplier != 1.0}
        with self._own("add_norm", residual if out is None else out, **fused):
            if delta is not None:
                change = delta if delta_norm is None else delta_norm.normalize(delta)
                residual += change * multiplier
            if out is not None:
                out.copy_(norm.normalize(residual))

    def multiply_rows(
        self,
        launcher: _Launcher,
        x: Tensor,
        x_scale: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor | None,
        bias: Tensor | None,
        out: Tensor,
        dtype: torch.dtype,
        workspace: _SplitWorkspace,
        *,
        activation: MlpActivation | None = None,
        residual: Tensor | None = None,
    ) -> None:
        with self._own("multiply_rows", out, activation=activation, residual=residual):
            assert x_scale is None and weight_scale is None, "codes have no reference here"
            y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
            y = y if activation is None else activation.apply(y)
            out.copy_(y if residual is None else y + residual)

    def normalize_heads(self, launcher: _Launcher, qkv: Tensor, norms: HeadNorms) -> None:
        with self._own("normalize_heads", qkv):
            parts = qkv.split(norms.sizes, dim=1)
            for part, normed in zip(parts, norms.normalize(parts), strict=True):
                part.copy_(normed)

    def apply_gate(
        self, launcher: _Launcher, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, out: Tensor
    ) -> None:
        with self._own("apply_gate", out, norm=weight):
            if weight is None:
                out.copy_(x * torch.sigmoid(gate))
            else:
                normed = _rms_norm(x.unflatten(1, (-1, len(weight))), weight, eps).flatten(1)
                out.copy_(normed * F.silu(gate))

    def place_latent(
        self, launcher: _Launcher, heads: Tensor, query: Tensor, key: Tensor, weight: Tensor, eps: float
    ) -> None:
        with self._own("place_latent", heads):
            rank = len(weight)
            rotated_dim = heads.shape[2] - rank
            heads[:, :-1, :rotated_dim] = query[..., query.shape[2] - rotated_dim :]
            heads[:, -1, :rotated_dim] = key[:, rank:]
            heads[:, -1, rotated_dim:] = _rms_norm(key[:, :rank], weight, eps)

    def activate(self, launcher: _Launcher, x: Tensor, out: Tensor, activation: MlpActivation) -> None:
        with self._own("activate", out, gated=activation.is_gated):
            out.copy_(activation.apply(x))

    def multiply_gated(
        self, launcher: _Launcher, x: Tensor, gate_up: Tensor, out: Tensor, activation: MlpActivation
    ) -> None:
        with self._own("multiply_gated", out):
            _product(x, gate_up, None, out, activation, None)

    def gemv(
        self,
        launcher: _Launcher,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        *,
        norm: Norm | None = None,
        activation: MlpActivation | None = None,
        residual: Tensor | None = None,
    ) -> None:
        assert len(x) == 1
        with self._own("gemv", out, norm=norm, **_words(activation), add=residual):
            _product(x if norm is None else norm.normalize(x), weight, bias, out, activation, residual)

    def skinny_linear(
        self,
        launcher: _Launcher,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        workspace: _SplitWorkspace,
        *,
        scales: CodeScales | None = None,
        activation: MlpActivation | None = None,
        residual: Tensor | None = None,
        norm: SplitNorm | None = None,
        norm_after: SplitNorm | None = None,
    ) -> None:
        assert 2 <= len(x) <= 64 and isinstance(workspace, _SplitWorkspace) and x.dtype == weight.dtype
        words = _words(activation) | {"half_norm": norm, "add": residual, "codes": scales}
        with self._own("skinny_linear", out, **words, half_norm_after=norm_after):
            if scales is None:
                factors = None
                if norm is not None:
                    assert x.data_ptr() == norm.rows.data_ptr()
                    mean = norm.squares[: len(x)].sum(1, keepdim=True) / x.shape[1]
                    factors = torch.rsqrt(mean + norm.eps)
                _product(x, weight, bias, out, activation, residual, factors)
                if norm_after is not None:
                    norm_after.rows.copy_(out * norm_after.weight)
                    norm_after.squares[: len(x), 0] = out.float().square().sum(1)
                return
            y = F.linear(x.float() * scales.rows[:, None], weight.float() * scales.weights[:, None])
            y = (y if bias is None else y + bias.float()).to(scales.dtype)
            y = y if activation is None else activation.apply(y)
            out.copy_(y if residual is None else y + residual)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _words(activation: MlpActivation | None) -> dict[str, bool]:
    """What a launch is said to fuse."""
    return {} if activation is None else {"gated" if activation.is_gated else "activated": True}


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    activation: MlpActivation | None,
    residual: Tensor | None,
    factors: Tensor | None = None,  # float32 [n, 1]
) -> None:
    if factors is None:
        y = F.linear(x, weight, bias)
    else:
        y = F.linear(x.float(), weight.float()) * factors
        y = (y if bias is None else y + bias).to(x.dtype)
    y = y if activation is None else activation.apply(y)
    out.copy_(y if residual is None else y + residual)


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))
