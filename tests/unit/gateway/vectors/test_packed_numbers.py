"""Numbers of 8 bits, as torch rounds them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.gateway.vectors.packed_numbers import FLOAT8, packed


@pytest.mark.parametrize(("name", "dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_codes_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    """All numbers of 16 bits up to the largest of 8, with every tie between two neighbours among them."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16).float()
    values = values[values.abs() <= torch.finfo(dtype).max]
    wanted = values.to(dtype).view(torch.uint8).numpy()
    assert packed(name, "<", values.numpy()) == wanted.tobytes()


@pytest.mark.parametrize("name", FLOAT8)
def test_numbers_out_of_range_become_the_largest_and_nan_stays(name: str) -> None:
    *_, last = FLOAT8[name]
    found = packed(name, "<", np.float32([1e30, -1e30, np.nan]))
    assert list(found) == [last, last | 0x80, 0x7F]
