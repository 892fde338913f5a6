"""How products of a few rows are shared out, where a Hopper's programs fill its multiprocessors."""

from __future__ import annotations

import pytest
import torch

from services.dense_worker.kernels.linear.rows_product import choose_rows_shape, num_parts, part_columns
from services.dense_worker.kernels.tensor_map import num_rows_there


@pytest.mark.parametrize(
    ("out_features", "is_gated", "is_added", "num_groups"),
    [
        (12288, False, False, 12),
        (11008, True, False, 11),
        (4096, False, True, 8),
        (32000, False, False, 31),
        (14336, True, False, 14),
        (5120, False, True, 10),
        (128256, False, False, None),  # more than a program's registers hold
        (28672, True, False, None),
        (1024, False, False, None),
        (4100, False, True, None),  # no whole groups
        (3600, False, True, None),  # more clusters than columns of squares
    ],
)
def test_programs_of_an_h200_share_out_the_features(
    out_features: int, is_gated: bool, is_added: bool, num_groups: int | None
) -> None:
    shape = choose_rows_shape(out_features, 132, is_gated=is_gated, is_added=is_added)
    if num_groups is None:
        assert shape is None
        return
    assert shape is not None and shape.num_groups == num_groups
    assert 120 < shape.num_programs <= 132
    num_parts, rest = divmod(shape.num_programs, 1 + is_added)
    assert not rest
    assert (num_groups - 1) * num_parts < out_features // 8 <= num_groups * num_parts


def test_no_row_is_read_beyond_the_memory_of_a_tensor() -> None:
    workspace = torch.zeros(40, 96)
    assert num_rows_there(workspace[:33], 64) == 40
    assert num_rows_there(workspace[:33], 32) == 32
    assert num_rows_there(workspace[3:5, 16:80], 64) == 37
    assert num_rows_there(workspace[39:, :8], 64) == 1
    wide = workspace.flatten()[: 33 * 96 + 90].view(-1)
    assert num_rows_there(wide[90:].unflatten(0, (33, 96))[:, 6:], 64) == 39


@pytest.mark.parametrize("in_features", [64, 512, 520, 2992, 4096, 11008])
@pytest.mark.parametrize("num_tiles", [1, 8, 24, 96])
def test_every_input_is_in_one_part_of_x_a(num_tiles: int, in_features: int) -> None:
    count = num_parts(num_tiles, in_features, 128)
    columns = part_columns(in_features, count)
    assert columns % 8 == 0 and count * num_tiles <= 128  # one program each, which reads 16 bytes at a time
    assert (count - 1) * columns < in_features <= count * columns
