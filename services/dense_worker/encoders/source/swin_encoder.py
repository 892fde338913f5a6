"""`SwinEncoder`: reads pictures for the cross attention of a decoder, as Donut (arXiv:2111.15664) and Nougat do.

Patches see each other in windows (arXiv:2103.14030), which are shifted by half their side in every second layer.
Pictures run one after another, and windows and rows in groups: memory does not grow with their number, and steps can be
run between two groups.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.common.families.shape import NormKind, SwinConfig
from services.dense_worker.encoders.vision.layer import multiply
from services.dense_worker.encoders.vision.patch_tower import convolution
from services.dense_worker.encoders.vision.picture import patches_of
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.model.operations import Operations
from services.dense_worker.parameters import Parameter, Source, parameters

MAX_SCORES = 2**24  # of one call, over all heads
MAX_MLP_ROWS = 2**16  # of one call
_OTHER_REGION = -100.0  # is added to scores between rows that are no neighbours but by the shift
_NORM_EPS = 1e-5  # of the norms outside of layers
_PREFIX = "encoder"


@dataclass(frozen=True, slots=True)
class Windows:
    """How the rows of a grid lie in windows: padded below and on the right, and shifted around the edges."""

    grid: tuple[int, int]
    size: int  # along a side
    shift: int

    @property
    def padded(self) -> tuple[int, int]:
        """The grid in whole windows."""
        return tuple(-(-side // self.size) * self.size for side in self.grid)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, columns, hidden] -> [num_windows, size ** 2, hidden]"""
        rows, columns = (whole - side for whole, side in zip(self.padded, self.grid, strict=True))
        shifted = F.pad(x, (0, 0, 0, columns, 0, rows)).roll((-self.shift, -self.shift), (0, 1))
        squares = shifted.unflatten(1, (-1, self.size)).unflatten(0, (-1, self.size)).transpose(1, 2)
        return squares.flatten(0, 1).flatten(1, 2)

    def join(self, windows: torch.Tensor) -> torch.Tensor:
        """The inverse of `split`, without the padding."""
        rows, columns = (side // self.size for side in self.padded)
        squares = windows.view(rows, columns, self.size, self.size, -1).transpose(1, 2)
        whole = squares.flatten(2, 3).flatten(0, 1).roll((self.shift, self.shift), (0, 1))
        return whole[: self.grid[0], : self.grid[1]]

    def mask(self, like: torch.Tensor) -> torch.Tensor | None:
        """What is added to scores, [num_windows, 1, size ** 2, size ** 2], in the dtype of `like`; None: nothing."""
        if not self.shift:
            return None
        sides = []
        for side in self.padded:
            place = torch.arange(side, device=like.device)
            sides.append((place >= side - self.size).long() + (place >= side - self.shift))
        regions = (3 * sides[0][:, None] + sides[1])[..., None]
        inside = Windows(self.padded, self.size, 0).split(regions)[..., 0]
        differs = inside[:, None, :, None] != inside[:, None, None, :]
        return differs.to(like.dtype) * _OTHER_REGION


@dataclass(frozen=True, slots=True)
class SwinLayer:
    """x + o(attention(norm(x))) within windows, then the same with an MLP."""

    attention_norm: Norm
    qkv: Linear
    o: Linear
    biases: Parameter  # [(2 * size - 1) ** 2, num_heads]: by the distance of rows and of columns
    mlp_norm: Norm
    up: Linear
    down: Linear
    num_heads: int
    is_shifted: bool
    activation: MlpActivation

    def parts(self, x: torch.Tensor, windows: Windows, max_products: int) -> Generator[None, None, torch.Tensor]:
        """x [rows, columns, hidden] -> the same shape; yields after about so many products."""
        inside = windows.split(self.attention_norm.normalize(x))
        yield
        attended = yield from self._attend(inside, windows.mask(x), windows.size, max_products)
        x = x + windows.join(attended)
        normed, added = self.mlp_norm.normalize(x).flatten(0, 1), []
        yield
        most = min(MAX_MLP_ROWS, max_products // (2 * self.up.out_features * x.shape[2]))
        for some in normed.split(max(1, most)):
            added.append(multiply(self.down, self.activation.apply(multiply(self.up, some))))
            yield
        return x + torch.cat(added).view(x.shape)

    def _attend(
        self, x: torch.Tensor, mask: torch.Tensor | None, size: int, max_products: int
    ) -> Generator[None, None, torch.Tensor]:
        """x [num_windows, size ** 2, hidden] -> the same shape; mask: as `Windows.mask` has it"""
        _, num_rows, hidden = x.shape
        bias = self.biases.data[relative_places(size, x.device)].permute(2, 0, 1)
        num_products = num_rows * hidden * (4 * hidden + 2 * num_rows)  # of a window
        most = max(1, min(MAX_SCORES // (self.num_heads * num_rows**2), max_products // num_products))
        found = []
        for first in range(0, len(x), most):
            some = x[first : first + most]
            qkv = multiply(self.qkv, some).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
            added = bias if mask is None else bias + mask[first : first + most]
            seen = F.scaled_dot_product_attention(*qkv, attn_mask=added.expand(len(some), -1, -1, -1))
            found.append(multiply(self.o, seen.transpose(1, 2).flatten(2)))
            yield
        return torch.cat(found)


def relative_places(size: int, device: torch.device) -> torch.Tensor:
    """Where the bias of each pair of a window's rows is: int64 [size ** 2, size ** 2], query first."""
    side = torch.arange(size, device=device)
    places = torch.cartesian_prod(side, side)
    distances = places[:, None] - places + size - 1
    return distances[..., 0] * (2 * size - 1) + distances[..., 1]


@dataclass(frozen=True, slots=True)
class Merging:
    """Four neighbouring rows become one: normalised together, and multiplied by a matrix."""

    norm: Norm
    reduction: Linear

    def parts(self, x: torch.Tensor, max_products: int) -> Generator[None, None, torch.Tensor]:
        """x [rows, columns, hidden] -> [rows / 2, columns / 2, 2 * hidden], rounded up; yields after so many products.
        """
        padded = F.pad(x, (0, 0, 0, x.shape[1] % 2, 0, x.shape[0] % 2))
        corners = torch.cat([padded[row::2, column::2] for column in range(2) for row in range(2)], dim=-1)
        most, found = max(1, max_products // (8 * x.shape[2] ** 2)), []
        for some in corners.flatten(0, 1).split(most):
            found.append(multiply(self.reduction, self.norm.normalize(some)))
            yield
        return torch.cat(found).unflatten(0, corners.shape[:2])


@dataclass(frozen=True, slots=True)
class SwinEncoder:
    """The `body` of a `SourceEncoder`."""

    config: SwinConfig
    patch_embedding: Parameter  # [embed_dim, 3 * patch_size ** 2]
    patch_bias: Parameter
    norm: Norm
    stages: tuple[tuple[SwinLayer, ...], ...]
    merging: tuple[Merging, ...]  # after all stages but the last

    def num_rows(self, source: torch.Tensor) -> int:
        """The rows of an input."""
        return self.config.num_outputs

    def num_inner_rows(self, source: torch.Tensor) -> int:
        """Its patches."""
        return math.prod(self.config.grid(0))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters, such as ("stages.0.1.qkv_weight", ...)."""
        for parameter in (self.patch_embedding, self.patch_bias, *parameters(self.norm)):
            yield parameter.name, parameter
        for stage, layers in enumerate(self.stages):
            parts = {f"stages.{stage}.{index}": layer for index, layer in enumerate(layers)}
            if stage < len(self.merging):
                parts[f"merging.{stage}"] = self.merging[stage]
            for name, part in parts.items():
                for parameter in parameters(part):
                    yield f"{name}.{parameter.name}", parameter

    def parts(
        self, operations: Operations, inputs: Sequence[torch.Tensor], max_products: int
    ) -> Generator[None, None, torch.Tensor]:
        """inputs: [3, height, width] each, in the model's dtype -> [inputs * num_outputs, hidden]"""
        found = []
        for each in inputs:
            found.append((yield from self._read(each, max_products)))
        return torch.cat(found)

    def _read(self, image: torch.Tensor, max_products: int) -> Generator[None, None, torch.Tensor]:
        size = self.config.patch_size
        whole = F.pad(image, (0, -image.shape[2] % size, 0, -image.shape[1] % size))
        patches = patches_of(whole, size).flatten(2)
        x = self.norm.normalize(F.linear(patches, self.patch_embedding.data, self.patch_bias.data))
        yield
        for stage, layers in enumerate(self.stages):
            grid, side = (x.shape[0], x.shape[1]), self.config.window_size
            # A grid that is one window along a side is not shifted at all.
            shift = side // 2 if min(grid) > side else 0
            for layer in layers:
                x = yield from layer.parts(x, Windows(grid, side, shift if layer.is_shifted else 0), max_products)
            if stage < len(self.merging):
                x = yield from self.merging[stage].parts(x, max_products)
        return x.flatten(0, 1)


def build_swin_encoder(config: SwinConfig, allocator: WeightAllocator) -> SwinEncoder:
    """The encoder, uninitialised, with the names of its tensors in checkpoints."""

    def norm(name: str, stored: str, size: int, eps: float = _NORM_EPS) -> Norm:
        return allocator.norm(name, f"{_PREFIX}.{stored}", size, eps, NormKind.LAYER)

    def linear(name: str, in_features: int, out_features: int, *stored: str, has_bias: bool = True) -> Linear:
        merged_from = tuple(Projection(f"{_PREFIX}.{each}", out_features) for each in stored)
        return allocator.linear(name, in_features, merged_from, Cut.OUT, has_bias)

    def layer(stage: int, index: int) -> SwinLayer:
        block, hidden, eps = f"encoder.layers.{stage}.blocks.{index}", config.embed_dim * 2**stage, config.norm_eps
        attention, inner, num_heads = f"{block}.attention.self", int(config.mlp_ratio * hidden), config.num_heads[stage]
        num_biases = (2 * config.window_size - 1) ** 2
        biases = (Source(f"{_PREFIX}.{attention}.relative_position_bias_table", num_biases),)
        return SwinLayer(
            norm("norm1", f"{block}.layernorm_before", hidden, eps),
            linear(
                "qkv",
                hidden,
                hidden,
                *(f"{attention}.{each}" for each in ("query", "key", "value")),
                has_bias=config.has_qkv_bias,
            ),
            linear("o", hidden, hidden, f"{block}.attention.output.dense"),
            allocator.parameter("biases", num_biases, num_heads, sources=biases),
            norm("norm2", f"{block}.layernorm_after", hidden, eps),
            linear("up", hidden, inner, f"{block}.intermediate.dense"),
            linear("down", inner, hidden, f"{block}.output.dense"),
            num_heads,
            index % 2 == 1,
            MlpActivation(config.activation, is_gated=False),
        )

    def merging(stage: int) -> Merging:
        block, hidden = f"encoder.layers.{stage}.downsample", config.embed_dim * 2**stage
        return Merging(
            norm("norm", f"{block}.norm", 4 * hidden),
            linear("reduction", 4 * hidden, 2 * hidden, f"{block}.reduction", has_bias=False),
        )

    rows, size = f"{_PREFIX}.embeddings.patch_embeddings.projection", config.embed_dim
    return SwinEncoder(
        config,
        convolution(f"{rows}.weight", size, config.patch_size, allocator),
        allocator.parameter("patch_bias", size, sources=(Source(f"{rows}.bias", size),)),
        norm("patch_norm", "embeddings.norm", size),
        tuple(tuple(layer(stage, index) for index in range(depth)) for stage, depth in enumerate(config.depths)),
        tuple(map(merging, range(len(config.depths) - 1))),
    )
