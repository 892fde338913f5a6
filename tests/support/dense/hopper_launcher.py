"""`HopperLauncher`: takes launches of kernels and compiles them for Hopper instead, which needs triton but no GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.dense_worker.kernels.triton_launch import KernelLauncher

HOPPER = GPUTarget("cuda", 90, 32)
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
}
_OPTIONS = ("num_warps", "num_stages", "maxnreg")
_ALIGNMENT = 16


class HopperLauncher(KernelLauncher):
    """Keeps what each launch was compiled to, by the kernel's name; nothing runs."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.shared_memory_bytes = 227 << 10
        self.compiled: dict[str, Any] = {}

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Compiles `kernel` as a launch with these arguments would, with programmatic dependent launch."""
        given = dict(zip(kernel.arg_names, args, strict=False)) | constants | {"PDL": True}
        signature, values, aligned = {}, {}, {}
        for i, parameter in enumerate(kernel.params):
            name, value = parameter.name, given[parameter.name]
            is_special = not parameter.do_not_specialize
            if isinstance(value, torch.Tensor):
                signature[name], aligned[(i,)] = _POINTERS[value.dtype], [["tt.divisibility", _ALIGNMENT]]
            elif parameter.is_constexpr or value is None or (is_special and isinstance(value, int) and value == 1):
                signature[name], values[(i,)] = "constexpr", value
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if is_special and isinstance(value, int) and value % _ALIGNMENT == 0:
                    aligned[(i,)] = [["tt.divisibility", _ALIGNMENT]]
        options = {name: constants[name] for name in _OPTIONS if constants.get(name) is not None}
        source = ASTSource(kernel, signature, values, aligned)
        self.compiled[kernel.__name__] = triton.compile(source, target=HOPPER, options=options)
