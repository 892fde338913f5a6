"""`QuantizedLayer`: what a format needs to know of a linear layer to allocate its tensors and name their sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.common.errors import ModelError
from services.dense_worker.kernels.linear.linear import Projection
from services.dense_worker.parameters import Conversion, Loaded, Parameter, Source, StoredTensor

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A linear layer whose weight is quantized."""

    name: str  # of the weight's first tensor; the names of the others begin with it
    in_features: int
    merged_from: tuple[Projection, ...]
    new_parameter: Callable[..., Parameter]  # `WeightAllocator.parameter`
    dtype: torch.dtype  # the model's

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The out_features of each projection."""
        return tuple(projection.out_features for projection in self.merged_from)

    @property
    def out_features(self) -> int:
        """Of all projections together."""
        return sum(self.part_sizes)

    def parameter(
        self, suffix: str, shape: tuple[int, ...], dtype: torch.dtype, source: Callable[[Projection], Source]
    ) -> Parameter:
        """A tensor that is filled by one source for each projection. `suffix` is empty for the first tensor."""
        sources = tuple(map(source, self.merged_from))
        assert sum(each.num_rows for each in sources) == shape[0], f"{self.name}{suffix}: {shape}, {sources}"
        return self.new_parameter(f"{self.name}{suffix}", *shape, sources=sources, dtype=dtype)


def converted(
    num_rows: int,
    convert: Callable[..., torch.Tensor],
    *inputs: StoredTensor,
    unit: tuple[int | None, int | None] = (None, None),
) -> Source:
    """A source made of `inputs`; it is named for the first of them. `unit` as in `Conversion`."""
    return Source(inputs[0].names[0], num_rows, Conversion(inputs, convert, unit))


def check_divides(size: int, what: str, value: int, name: str) -> None:
    """Raises ModelError if `value` of the layer `name` is no multiple of `size`."""
    if value % size:
        raise ModelError(f"{name} has {what} {value}, expected a multiple of {size}, the size of a group")


def checked_scales(loaded: Loaded, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The scales in `dtype`. Raises ModelError, naming tensor, place and value, unless all are finite and above 0.

    A bad one would make wrong numbers, or NaN, without an error.
    """
    scales = loaded.tensor.to(dtype)
    bad = ~(torch.isfinite(scales) & (scales > 0))
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        raise ModelError(
            f"{loaded.name} holds the scale {scales[index].item()} at {list(index)} "
            f"({loaded.tensor[index].item()} as stored), expected finite numbers above 0"
        )
    return scales
