"""The quantization of a layer's input, as a checkpoint prescribes it. The result is dequantized again: a reference."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from services.common.quantization.schemes import Element
from services.dense_worker.kernels.linear.linear import multiply_matrix

RANGES = {Element.FP8: (-448.0, 448.0), Element.INT8: (-128.0, 127.0)}  # the least and the greatest code
GREATEST = {Element.FP8: 448.0, Element.INT8: 127.5}  # the code of a token's greatest value: half of the range
SMALLEST_GREATEST = 1e-12  # a row of zeros gets the scale of this greatest value


def token_scale(x: torch.Tensor, element: Element, max_activation: float | None = None) -> torch.Tensor:
    """x [..., size] -> float32 [..., 1]: the scale by which the greatest value of each row becomes `GREATEST`.

    For INT8 that is 127.5, as in compressed-tensors, which rounds to -128 or is cut off at 127. With `max_activation`
    greater values do not count, and are cut off.
    """
    greatest = x.abs().amax(-1, keepdim=True).float().clamp(min=SMALLEST_GREATEST, max=max_activation)
    return greatest / GREATEST[element]


def to_codes(x: torch.Tensor, scale: torch.Tensor, element: Element) -> torch.Tensor:
    """x / scale, rounded to the nearest code (ties to even) and cut off at the ends: in the element's type."""
    scaled = (x.float() / scale).clamp(*RANGES[element])
    return scaled.to(torch.float8_e4m3fn) if element is Element.FP8 else scaled.round().to(torch.int8)


def rounded(x: torch.Tensor, scale: torch.Tensor, element: Element) -> torch.Tensor:
    """x as its codes represent it, in x's dtype."""
    return (to_codes(x, scale, element).float() * scale).to(x.dtype)


def multiply_rounded(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """Like `multiply_matrix`, for an input that was `rounded`; float32 is summed in float64.

    So a row's product does not depend on what other rows there are, except for sums that are all but zero, and once in
    about 10^8 numbers. In float32 it would, by a last bit, which moves some number of a later layer's input to the next
    code: 10^5 times as much.
    """
    if x.dtype != torch.float32:
        return multiply_matrix(x, matrix, bias, out)
    product = multiply_matrix(x.double(), matrix.double(), None if bias is None else bias.double(), None).float()
    return product if out is None else out.copy_(product)


def rounded_by_groups(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """x [n, in_features] as FP8 with a scale for each row and group of features; the last group may be shorter."""
    num_features = x.shape[-1]
    groups = F.pad(x, (0, -num_features % group_size)).unflatten(-1, (-1, group_size))
    result = rounded(groups, token_scale(groups, Element.FP8), Element.FP8)
    return result.flatten(-2)[..., :num_features]
