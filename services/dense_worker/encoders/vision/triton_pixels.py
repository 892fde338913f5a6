"""Pictures by kernels: Pillow's resize, and the numbers of their bytes that a tower reads.

torch has a kernel for each step of each tap of a filter: about 60 for a picture, which take the host longer to launch
than a GPU to run. References, which these equal to the bit: `resample`, `scale_bytes`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.dense_worker.encoders.vision.resample import HALF, PRECISION_BITS, passes_of, taps_of
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin
from services.dense_worker.sampling.upload import upload

_BLOCK = 1024  # numbers of one program


def resample_lines(
    launcher: KernelLauncher, pixels: torch.Tensor, height: int, width: int, filter_number: int
) -> torch.Tensor:
    """uint8 [old_height, old_width, colours], contiguous -> uint8 [height, width, colours]."""
    for dim, size in passes_of(pixels.shape, height, width):
        shape = list(pixels.shape)
        old, shape[dim] = shape[dim], size
        taps, out = taps_of(old, size, filter_number), pixels.new_empty(shape)
        launcher(
            _lines_kernel,
            (triton.cdiv(out.numel(), _BLOCK),),
            out,
            pixels,
            upload(taps, pixels.device),
            out.numel(),
            old,
            size,
            out.stride(dim),
            len(taps) - 1,
            HALF=HALF,
            PRECISION_BITS=PRECISION_BITS,
            BLOCK=_BLOCK,
            num_warps=4,
        )
        pixels = out
    return pixels


def look_up(launcher: KernelLauncher, tiles: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [num_tiles, height, width, 3], contiguous -> [num_tiles, 3, height, width]; numbers [256, 3]: of bytes."""
    num_tiles, height, width, num_colours = tiles.shape
    out = numbers.new_empty(num_tiles, num_colours, height, width)
    launcher(
        _look_up_kernel,
        (triton.cdiv(height * width, _BLOCK), num_tiles * num_colours),
        out,
        tiles,
        numbers,
        height * width,
        NUM_COLOURS=num_colours,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out


# Every size of a picture has other numbers: none may compile a kernel of its own while others wait for tokens.
@triton.jit(do_not_specialize=["num_numbers", "old", "size", "inner", "num_taps"])
def _lines_kernel(
    out,  # uint8 [outer, size, inner]
    pixels,  # uint8 [outer, old, inner]
    taps,  # int32 [1 + num_taps, size]: the first place of each number, then the weights of it and of those behind it
    num_numbers,
    old,
    size,
    inner,
    num_taps,
    HALF: tl.constexpr,
    PRECISION_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK numbers of `out`."""
    begin(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_numbers
    place = index // inner % size
    line = pixels + index // inner // size * old * inner + index % inner
    first = tl.load(taps + place, mask=mask, other=0)
    total = tl.full((BLOCK,), HALF, tl.int32)
    for tap in range(num_taps):
        weight = tl.load(taps + (1 + tap) * size + place, mask=mask, other=0)
        at = tl.minimum(first + tap, old - 1)
        total += weight * tl.load(line + at * inner, mask=mask, other=0).to(tl.int32)
    total = tl.minimum(tl.maximum(total >> PRECISION_BITS, 0), 255)
    tl.store(out + index, total.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["num_pixels"])
def _look_up_kernel(
    out,  # [num_tiles, NUM_COLOURS, num_pixels]
    tiles,  # uint8 [num_tiles, num_pixels, NUM_COLOURS]
    numbers,  # [256, NUM_COLOURS]
    num_pixels,
    NUM_COLOURS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program writes BLOCK numbers of a colour of a tile."""
    begin(PDL)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pixel < num_pixels
    plane = tl.program_id(1).to(tl.int64)
    colour = plane % NUM_COLOURS
    byte = tl.load(tiles + (plane // NUM_COLOURS * num_pixels + pixel) * NUM_COLOURS + colour, mask=mask, other=0)
    number = tl.load(numbers + byte.to(tl.int32) * NUM_COLOURS + colour, mask=mask, other=0.0)
    tl.store(out + plane * num_pixels + pixel, number, mask=mask)
