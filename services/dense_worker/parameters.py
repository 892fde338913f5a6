"""`Parameter`s: the named tensors of a model's parts, which can be listed and exchanged by name.

A part is a frozen dataclass whose fields are parameters, other parts, tuples of these, or plain values. So all parts of
all families can be listed, loaded, and rebuilt from tensors that are inputs of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import product
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

Part = TypeVar("Part")


class Loaded(NamedTuple):
    """A tensor of a checkpoint, and its name for errors."""

    name: str
    tensor: torch.Tensor  # on the device of the parameter


Pieces = tuple[tuple[int, int], ...]  # (first, end) of each, ascending


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Some rows or columns of a tensor: `dims` lists the pieces of its first dimensions, None for all of one.

    >>> str(TensorPart((None, ((0, 2), (4, 6)))))
    '[:, 0:2 and 4:6]'
    """

    dims: tuple[Pieces | None, ...]  # at most one has several pieces

    def __str__(self) -> str:
        each = (":" if dim is None else " and ".join(f"{first}:{end}" for first, end in dim) for dim in self.dims)
        return f"[{', '.join(each)}]"

    def of(self, tensor: Any) -> torch.Tensor:
        """The part of a tensor, or of what is indexed like one."""
        slices = [(slice(None),) if dim is None else [slice(*piece) for piece in dim] for dim in self.dims]
        parts = [tensor[index] for index in product(*slices)]
        several = [dim for dim, pieces in enumerate(slices) if len(pieces) > 1]
        assert len(several) <= 1, self
        return torch.cat(parts, dim=several[0]) if several else parts[0]


class Axes(NamedTuple):
    """The dimensions of a stored tensor that the rows and the columns made of it lie along.

    None: it is needed whole, whichever of them are made.
    """

    rows: int | None = None
    columns: int | None = None
    num_runs: int = 1  # the rows are so many runs of equally many, and lie along the dimension in each run anew

    @property
    def unit(self) -> tuple[int | None, int | None]:
        """`Conversion.unit`, if each row and column has elements of its own."""
        return None if self.rows is None else 1, None if self.columns is None else 1


WHOLE = Axes()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that a checkpoint must have, in its own layout."""

    names: tuple[str, ...]  # alternatives: the first that the checkpoint has counts
    dtypes: tuple[str, ...]  # any of these, as safetensors names them
    shapes: tuple[tuple[int, ...], ...]  # any of these
    is_optional: bool = False
    axes: Axes = WHOLE
    part: TensorPart | None = None  # only this is read; None: all of it


@dataclass(frozen=True, slots=True)
class Conversion:
    """Makes rows of a parameter of one or several tensors of a checkpoint.

    It converts parts of the tensors, too: those of whole units, which `StoredTensor.axes` finds.
    """

    inputs: tuple[StoredTensor, ...]
    convert: Callable[..., torch.Tensor]  # takes a `Loaded` for each input, or None for an absent optional one
    unit: tuple[int | None, int | None] = (None, None)  # rows and columns that can be made alone; None: only all


class StoredLayout(Protocol):
    """How a checkpoint stores a tensor, if it is not as we do."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the checkpoint of a tensor that has `shape` here."""

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        """The checkpoint's tensor, with its elements where we have them; the same of a part that `axes` allows."""

    def axes(self, num_dims: int) -> Axes:
        """Where the rows and columns of a tensor of `num_dims` dimensions here lie in the checkpoint's."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of a Hugging Face checkpoint that fills `num_rows` rows of a parameter."""

    name: str  # such as "model.layers.0.self_attn.q_proj.weight"
    num_rows: int  # along dimension 0
    conversion: Conversion | None = None  # None: the tensor has these rows, in any float dtype


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a model. Never written after loading."""

    name: str  # unique among the inputs of a segment, such as "qkv_weight"
    data: torch.Tensor
    sources: tuple[Source, ...] = ()  # in the order of their rows; empty if no checkpoint tensor fills it


def parts_of_type(kind: type[Part], part: Any) -> Iterator[Part]:
    """All parts of a class within `part`, in the order of its fields."""
    if isinstance(part, kind):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from parts_of_type(kind, each)
    elif is_dataclass(part):
        for field in fields(part):
            yield from parts_of_type(kind, getattr(part, field.name))


def parameters(part: Any) -> Iterator[Parameter]:
    """All parameters of a part, in the order of its fields."""
    return parts_of_type(Parameter, part)


def share_of_rows(part: Part, index: int, count: int) -> Part:
    """One of `count` equal shares of the rows of each tensor of `part`, a dataclass of parameters: views."""
    changes = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Parameter):
            changes[field.name] = Parameter(value.name, value.data.unflatten(0, (count, -1))[index])
    return replace(part, **changes)


def tensors_by_name(part: Any) -> dict[str, torch.Tensor]:
    """The tensors of a part, in the order of its fields. Their names must differ."""
    found = list(parameters(part))
    tensors = {parameter.name: parameter.data for parameter in found}
    assert len(tensors) == len(found), f"two of {[parameter.name for parameter in found]} have one name"
    return tensors


def with_tensors(part: Part, tensors: Mapping[str, torch.Tensor]) -> Part:
    """The same part with other tensors. `tensors` must have one for the name of each parameter."""
    if isinstance(part, Parameter):
        return replace(part, data=tensors[part.name])
    if isinstance(part, tuple):
        return tuple(with_tensors(each, tensors) for each in part)
    if is_dataclass(part):
        changes = {field.name: with_tensors(getattr(part, field.name), tensors) for field in fields(part)}
        return replace(part, **changes)
    return part
