"""`CublasLt`: the products of 16-bit matrices by candidates of cuBLASLt's heuristics, through ctypes.

torch takes the first candidate, which for some numbers of rows takes a fifth longer than a later one. The library is
the one that torch has loaded. Of its structures only those are laid out here that its header lays out, too.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from services.common.errors import DeviceError

_FLOAT32, _BFLOAT16, _FLOAT16, _COMPUTE_FLOAT32 = 0, 14, 2, 68  # as in library_types.h and cublas_api.h
_TYPES = {torch.bfloat16: _BFLOAT16, torch.float16: _FLOAT16}
_TRANSPOSE_FIRST, _MOST_WORKSPACE = 3, 1  # attributes of a product and of a preference
WORKSPACE_BYTES = 32 << 20  # as torch's


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Found(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int32),
        ("num_waves", ctypes.c_float),
        ("reserved", ctypes.c_int32 * 4),
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to multiply operands of certain shapes and strides."""

    product: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]  # of the matrix, x and out
    algorithm: _Algorithm


class CublasLt:
    """The library on one device. Its products share a workspace, so they are for one stream."""

    def __init__(self, device: torch.device) -> None:
        """Raises `DeviceError` if the library is not there."""
        assert torch.version.cuda is not None, "torch has CUDA"
        name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
        try:
            self._library = ctypes.CDLL(name)  # loaded already: found by its name
        except OSError as error:
            raise DeviceError(f"{name} cannot be loaded: {error}") from error
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def candidates(self, x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor, most: int) -> list[Candidate]:
        """Up to `most` ways to compute `multiply` for operands like these, which the heuristics put first."""
        product, preference = ctypes.c_void_p(), ctypes.c_void_p()
        self._call(
            "cublasLtMatmulDescCreate",
            ctypes.byref(product),
            ctypes.c_int32(_COMPUTE_FLOAT32),
            ctypes.c_int32(_FLOAT32),
        )
        transposes, most_bytes = ctypes.c_int32(1), ctypes.c_uint64(WORKSPACE_BYTES)
        self._set("cublasLtMatmulDescSetAttribute", product, _TRANSPOSE_FIRST, transposes)
        # In its columns: out.T [out_features, n] = (matrix.T).T x.T
        layouts = self._layout(matrix), self._layout(x), self._layout(out)
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        self._set("cublasLtMatmulPreferenceSetAttribute", preference, _MOST_WORKSPACE, most_bytes)
        found, num_found = (_Found * most)(), ctypes.c_int32()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            product,
            *layouts,
            layouts[2],
            preference,
            ctypes.c_int32(most),
            found,
            ctypes.byref(num_found),
        )
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        usable = (each for each in found[: num_found.value] if each.status == 0)
        return [Candidate(product, layouts, each.algorithm) for each in usable]

    def multiply(self, candidate: Candidate, x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
        """out = x matrix.T, enqueued on the current stream. The operands are like those of its `candidates`."""
        matrix_layout, x_layout, out_layout = candidate.layouts
        self._call(
            "cublasLtMatmul",
            self._handle,
            candidate.product,
            ctypes.byref(self._one),
            ctypes.c_void_p(matrix.data_ptr()),
            matrix_layout,
            ctypes.c_void_p(x.data_ptr()),
            x_layout,
            ctypes.byref(self._zero),
            ctypes.c_void_p(out.data_ptr()),
            out_layout,
            ctypes.c_void_p(out.data_ptr()),
            out_layout,
            ctypes.byref(candidate.algorithm),
            ctypes.c_void_p(self._workspace.data_ptr()),
            ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )

    def _layout(self, rows: torch.Tensor) -> ctypes.c_void_p:
        """That of rows [n, size], which are the columns of a matrix [size, n]."""
        layout, (num_rows, size) = ctypes.c_void_p(), rows.shape
        self._call(
            "cublasLtMatrixLayoutCreate",
            ctypes.byref(layout),
            ctypes.c_int32(_TYPES[rows.dtype]),
            ctypes.c_uint64(size),
            ctypes.c_uint64(num_rows),
            ctypes.c_int64(rows.stride(0)),
        )
        return layout

    def _set(
        self, function: str, target: ctypes.c_void_p, attribute: int, value: ctypes.c_int32 | ctypes.c_uint64
    ) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call(function, target, ctypes.c_int32(attribute), ctypes.byref(value), size)

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise DeviceError(f"{function} failed with status {status}")
