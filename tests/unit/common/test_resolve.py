"""What start-up makes of a GPU that is too small."""

from __future__ import annotations

import pytest
import torch

from services.common.errors import CapacityError
from services.common.resolve import naming_what_needs_memory

# As torch 2.11 words it on an H200.
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 172.00 MiB. GPU 0 has a total capacity of 139.81 GiB of which 61.25 MiB is "
    "free. Including non-PyTorch memory, this process has 139.74 GiB memory in use. Of the allocated memory 138.8 GiB "
    "is allocated by PyTorch, and 12.5 MiB is reserved by PyTorch but unallocated."
)


def test_what_needs_memory_and_how_much_there_is_are_named() -> None:
    sizes = r"no room for the weights: .*172\.00 MiB .*139\.81 GiB .*61\.25 MiB is free$"
    with pytest.raises(CapacityError, match=sizes), naming_what_needs_memory("the weights"):
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="illegal"), naming_what_needs_memory("the weights"):
        raise RuntimeError("an illegal memory access")
