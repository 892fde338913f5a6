"""Computes the dense worker's Triton kernels by torch on a CPU, without triton, and records each launch.

These functions replace the modules `services.dense_worker.backends.triton_*`. So `CudaBackend` itself runs everywhere,
and a test can read which kernels a step launches, in which order, and the shapes of their results.
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

PACKAGE = "services.dense_worker.backends"
# The operations of torch that launch a kernel. Views and allocations do not.
TORCH_KERNELS = ("mm", "addmm", "linear", "index_select", "embedding", "copy_", "_to_copy")
TORCH_KERNELS += ("add", "add_", "mul", "silu", "cat", "fill_", "zero_")
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
            self.launches.append(f"{name} {_shape(result)}")
        return result


@contextmanager
def fake_triton_kernels() -> Iterator[LaunchRecorder]:
    """A context in which `CudaBackend` can be imported, and runs on the device of the weights."""
    recorder = LaunchRecorder()
    modules = _Kernels(recorder).modules()
    replaced = {name: module for name, module in sys.modules.items() if _is_cuda_module(name)}
    for name in replaced:
        del sys.modules[name]
    for name, contents in modules.items():
        sys.modules[f"{PACKAGE}.{name}"] = module = ModuleType(f"{PACKAGE}.{name}")
        vars(module).update(contents)
    try:
        yield recorder
    finally:
        for name in [name for name in sys.modules if _is_cuda_module(name)]:
            del sys.modules[name]
        sys.modules.update(replaced)


def _is_cuda_module(name: str) -> bool:
    """Whether it is a module of kernels, or one that imports kernels."""
    prefixes = ("triton_", "cuda_", "streamed_", "quantized.triton_", "quantized.streamed_", "quantized.multiplied_")
    prefixes += ("experts.triton_", "experts.cuda_")
    return name.startswith(tuple(f"{PACKAGE}.{prefix}" for prefix in prefixes))


class _Launcher:
    """Replaces KernelLauncher."""

    num_sms = NUM_SMS
    shared_memory_bytes = SHARED_MEMORY_BYTES

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
            "triton_activation": {"silu_mul": self.silu_mul},
            "triton_gemv": {"gemv": self.gemv, "MAX_IN_FEATURES": 32768},
            "triton_gate": {"apply_gate": self.apply_gate},
            "triton_latent": {"place_latent": self.place_latent},
            "triton_launch": {"KernelLauncher": _Launcher},
            "triton_norm": {"add_rms_norm": self.add_rms_norm, "head_rms_norm": self.head_rms_norm},
            "triton_skinny": {
                "skinny_linear": self.skinny_linear,
                "SplitWorkspace": _SplitWorkspace,
                "SPLIT_AREA": 4096,
            },
            **expert_kernels(self._own),
            "quantized.triton_prepare": {"prepare_input": prepare_input},
            "quantized.triton_skinny_quantized": {"skinny_quantized": skinny_quantized, "PROGRAMS_PER_SM": 1},
            "quantized.triton_gemv_quantized": {"can_gemv": can_gemv, "gemv_quantized": gemv_quantized},
            "quantized.triton_value_tiles": {"multiply_value_tiles": partial(multiply_tiles, self._own)},
            "quantized.triton_block_tiles": {"multiply_block_tiles": partial(multiply_tiles, self._own)},
            "quantized.triton_dequantize": {"can_dequantize": can_dequantize, "dequantize": dequantize},
        }

    def add_rms_norm(
        self,
        launcher: _Launcher,
        residual: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        out: Tensor,
        *,
        is_plus_one: bool = False,
    ) -> None:
        with self._own("add_rms_norm", out, add=delta):
            if delta is not None:
                residual += delta
            out.copy_(_rms_norm(residual, weight + 1 if is_plus_one else weight, eps))

    def head_rms_norm(
        self,
        launcher: _Launcher,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        num_heads: int,
        num_kv_heads: int,
        eps: float,
        *,
        is_plus_one: bool = False,
    ) -> None:
        with self._own("head_rms_norm", qkv):
            q_weight, k_weight = (each + 1 if is_plus_one else each for each in (q_weight, k_weight))
            heads = qkv.view(len(qkv), -1, len(q_weight))
            q, k, _ = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
            q.copy_(_rms_norm(q, q_weight, eps))
            k.copy_(_rms_norm(k, k_weight, eps))

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

    def silu_mul(self, launcher: _Launcher, gate_up: Tensor, out: Tensor) -> None:
        with self._own("silu_mul", out):
            out.copy_(_swiglu(gate_up))

    def gemv(
        self,
        launcher: _Launcher,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        *,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        is_gated: bool = False,
        residual: Tensor | None = None,
    ) -> None:
        assert len(x) == 1
        with self._own("gemv", out, norm=norm_weight, gated=is_gated, add=residual):
            normed = x if norm_weight is None else _rms_norm(x, norm_weight, eps)
            _product(normed, weight, bias, out, is_gated, residual)

    def skinny_linear(
        self,
        launcher: _Launcher,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        workspace: _SplitWorkspace,
        *,
        is_gated: bool = False,
        residual: Tensor | None = None,
    ) -> None:
        assert 2 <= len(x) <= 64 and isinstance(workspace, _SplitWorkspace)
        with self._own("skinny_linear", out, gated=is_gated, add=residual):
            _product(x, weight, bias, out, is_gated, residual)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate) * up


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, is_gated: bool, residual: Tensor | None
) -> None:
    y = F.linear(x, weight, bias)
    y = _swiglu(y) if is_gated else y
    out.copy_(y if residual is None else y + residual)


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))
