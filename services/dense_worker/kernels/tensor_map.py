"""What a Hopper's copy unit needs to know of a tensor, of which it copies boxes into shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

TensorMap = ctypes.c_uint64 * 16  # CUtensorMap, which must begin at a multiple of 64 bytes on the device


def map_of(
    data: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> ctypes.Array[ctypes.c_uint64]:
    """How the copy unit finds boxes of a tensor of bfloat16 or of bytes. What is beyond `sizes` is zeros.

    data: where it begins, at a multiple of 16 bytes; sizes, box: elements of each dimension, the one that lies
    together first; strides: bytes, multiples of 16, of all dimensions but that one. A box is 128 bytes wide, which
    are swizzled. Raises DeviceError for a map that the driver refuses. The memory must outlive the kernels
    that read it.
    """
    from cuda.bindings import driver

    from services.channel.cuda_flags import check

    types = driver.CUtensorMapDataType
    made = check(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_UINT8 if data.itemsize == 1 else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(sizes),
            data.data_ptr(),
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TensorMap(*(int(word) for word in made.opaque))


def num_rows_there(x: torch.Tensor, block_rows: int) -> int:
    """How many of a block's rows lie in the memory of x, [n, in_features]; what is in those beyond n does not matter.

    The copy unit is slow where a block has rows beyond a descriptor's last: 33 rows took 25 % longer than 64.
    """
    num_behind = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset() - x.shape[1]
    return min(block_rows, num_behind // x.stride(0) + 1)
