"""What lies between two attention calls, for one row, as one kernel in CUDA C++ (`row_stroke.cu`), on Hopper.

Between two kernels memory is idle for a moment, even if the second is launched before the first has ended. This kernel
goes on copying weights while its programs wait for each other. Reference: `Middle.forward`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from services.common.families.shape import Activation
from services.common.quantization.schemes import Activations, Element
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import MAX_IN_FEATURES, Linear, PlainWeight
from services.dense_worker.kernels.linear.quantized.scaled_weight import ScaledWeight
from services.dense_worker.kernels.norm.norm import RmsNorm
from services.dense_worker.model.layer import AfterAttention, NormedQkv, SequentialResidual
from services.dense_worker.model.mlp import ActivatedMlp
from services.dense_worker.model.segments import Middle

if TYPE_CHECKING:
    from services.dense_worker.kernels.triton_launch import KernelLauncher

_FEATURES = 256  # that a warp multiplies at a time
_NUM_WARPS = 8
_MAX_STAGE_BYTES = 32 << 10
_MAX_STAGE_ROWS = 16  # which a thread multiplies in registers
_MAX_STAGES = 16
_RING_BYTES = 192 << 10  # which leaves attention's programs some room beside it
_COPY_ALIGNMENT = 16  # bytes, of bulk copies
_NONE = -1  # the bits of a place that has no result yet
_COUNTER_BYTES = 128  # a cache line for each


@dataclass(frozen=True, slots=True)
class StrokeShape:
    """Sizes of the products' inputs and outputs, and how the weights are stored."""

    hidden: int
    attn: int
    inner: int
    qkv: int
    is_fp8: bool


class _Params(ctypes.Structure):
    """The struct `Params` of the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("exchanged", "launches", "arrivals")),
        *((name, ctypes.c_void_p) for name in ("o", "gate_up", "down", "qkv")),
        *((name, ctypes.c_void_p) for name in ("o_scales", "gate_up_scales", "down_scales", "qkv_scales")),
        *((name, ctypes.c_void_p) for name in ("mlp_norm", "qkv_norm", "attn_out", "residual", "qkv_out")),
        ("eps", ctypes.c_float),
    ]


class RowStroke:
    """The kernel for segments of one shape, on one stream: launches share the places of results."""

    def __init__(self, launcher: KernelLauncher, shape: StrokeShape, device: torch.device) -> None:
        """Compiles the kernel, unless the cache has it. Raises `DeviceError`."""
        from services.dense_worker.kernels.cuda_source import CudaKernel

        binary = compile_stroke(launcher, shape, device)
        self.shape, self._num_sms = shape, launcher.num_sms
        ring = _constants(launcher, shape)
        own = ring["MAX_ROWS"] * (_NUM_WARPS + 1) * 4 + 2 * _NUM_WARPS * 4 + 16 * _MAX_STAGES  # sums and barriers
        shared_bytes = own + ring["NUM_STAGES"] * ring["STAGE_BYTES"]
        self._kernel = CudaKernel(binary, "row_stroke", (_NUM_WARPS + 1) * 32, shared_bytes)
        self._exchanged = torch.full((2, 2 * shape.hidden + shape.inner), _NONE, dtype=torch.int16, device=device)
        self._counters = torch.zeros(2, _COUNTER_BYTES // 4, dtype=torch.int32, device=device)

    def __call__(
        self,
        segment: Middle,
        attn_out: torch.Tensor,  # [1, attn]
        residual: torch.Tensor,  # [1, hidden]: added to in place
        qkv_out: torch.Tensor,  # [1, qkv]: written
    ) -> None:
        """Like `Middle.forward`, of a segment for which `shape_of` gives this shape."""
        launches, arrivals = self._counters
        params = _Params(self._exchanged.data_ptr(), launches.data_ptr(), arrivals.data_ptr())
        after, before = segment.after, segment.before
        linears = {"o": after.o, "gate_up": after.mlp.first, "down": after.mlp.down, "qkv": before.qkv}
        for name, linear in linears.items():
            setattr(params, name, linear.weight.matrix.data.data_ptr())
            if self.shape.is_fp8:
                setattr(params, f"{name}_scales", linear.weight.scale.data.data_ptr())
        params.mlp_norm, params.qkv_norm = after.mlp.norm.weight.data.data_ptr(), before.norm.weight.data.data_ptr()
        params.eps = before.norm.eps
        params.attn_out, params.residual = attn_out.data_ptr(), residual.data_ptr()
        params.qkv_out = qkv_out.data_ptr()
        self._kernel(self._num_sms, params)


def compile_stroke(launcher: KernelLauncher, shape: StrokeShape, device: torch.device) -> bytes:
    """The kernel's binary; takes some seconds if the cache does not have it. Raises `DeviceError`."""
    from services.dense_worker.kernels.cuda_source import compiled

    return compiled(Path(__file__).with_name("row_stroke.cu"), _constants(launcher, shape), device)


def _constants(launcher: KernelLauncher, shape: StrokeShape) -> dict[str, int]:
    num_sms, stage_bytes = launcher.num_sms, choose_stage_bytes(shape)
    return {
        "HIDDEN": shape.hidden,
        "ATTN": shape.attn,
        "INNER": shape.inner,
        "QKV": shape.qkv,
        "IS_FP8": int(shape.is_fp8),
        "NUM_WARPS": _NUM_WARPS,
        "NUM_STAGES": min(_RING_BYTES // stage_bytes, _MAX_STAGES),
        "STAGE_BYTES": stage_bytes,
        "MAX_ROWS": max(2 * -(-shape.inner // num_sms), -(-max(shape.qkv, shape.hidden) // num_sms)),
    }


def choose_stage_bytes(shape: StrokeShape) -> int:
    """Whole rows of hidden_size, and of the widest product with as little room left as possible."""
    width = 1 if shape.is_fp8 else 2
    row, widest = shape.hidden * width, max(shape.hidden, shape.attn, shape.inner) * width
    fewest = -(-widest // row)
    most = max(min(_MAX_STAGE_BYTES // row, _MAX_STAGE_ROWS), fewest)
    sizes = [row * num_rows for num_rows in range(fewest, most + 1)]
    return max(sizes, key=lambda size: (size // widest * widest / size, size))


def shape_of(segment: Middle, launcher: KernelLauncher, dtype: torch.dtype) -> StrokeShape | str:
    """The shape for which there is a kernel, or why there is none for this segment."""
    if not launcher.is_hopper:
        return "the GPU is not of compute capability 9"
    if dtype != torch.bfloat16:
        return f"the model's dtype is {dtype}, the kernel needs bfloat16"
    after, before = segment.after, segment.before
    if not _is_llama(after) or not isinstance(before, NormedQkv) or before.head_norms is not None:
        return "the layers are not those of Llama"
    norms = after.mlp.norm, before.norm
    if not all(isinstance(norm, RmsNorm) for norm in norms) or norms[0].eps != norms[1].eps:
        return "the norms are not RMSNorm with one eps"
    linears = after.o, after.mlp.first, after.mlp.down, before.qkv
    if any(linear.bias is not None for linear in linears):
        return "a layer has a bias"
    is_fp8 = all(_is_fp8(linear) for linear in linears)
    if not is_fp8 and not all(isinstance(linear.weight, PlainWeight) for linear in linears):
        return "the weights are neither bfloat16 nor FP8 with scales of rows and tokens"
    tensors = [linear.weight.matrix.data for linear in linears] + [norm.weight.data for norm in norms]
    if not all(tensor.is_contiguous() and tensor.data_ptr() % _COPY_ALIGNMENT == 0 for tensor in tensors):
        return f"weights do not begin at multiples of {_COPY_ALIGNMENT} bytes without gaps"
    sizes = [linear.in_features for linear in linears]
    if any(size % _FEATURES for size in sizes):
        return f"in_features are {sizes}, the kernel needs multiples of {_FEATURES}"
    if max(sizes) > MAX_IN_FEATURES:
        return f"in_features are {sizes}, at most {MAX_IN_FEATURES} fit into registers"
    outputs = [linear.out_features // (1 + (linear is after.mlp.first)) for linear in linears]
    if any(size > launcher.num_sms * _NUM_WARPS * 32 for size in outputs):
        return f"out_features are {outputs}, a program has no threads for so many rows"
    return StrokeShape(sizes[1], sizes[0], sizes[2], outputs[3], is_fp8)


def _is_llama(after: AfterAttention) -> bool:
    if not isinstance(after, SequentialResidual) or not isinstance(after.mlp, ActivatedMlp):
        return False
    is_normed = after.norm_after_attention is not None or after.norm_after_mlp is not None
    is_scaled = after.multiplier != 1.0 or after.added_input is not None or after.layer_scalar is not None
    return not is_normed and not is_scaled and after.mlp.activation == MlpActivation(Activation.SILU, is_gated=True)


def _is_fp8(linear: Linear) -> bool:
    weight = linear.weight
    if not isinstance(weight, ScaledWeight) or weight.element is not Element.FP8:
        return False
    return weight.activations is Activations.TOKEN and weight.max_activation is None
