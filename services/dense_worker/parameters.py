"""`Parameter`s: the named tensors of a model's parts, which can be listed and exchanged by name.

A part is a frozen dataclass whose fields are parameters, other parts, tuples of these, or plain values. So all parts of
all families can be listed, loaded, and rebuilt from tensors that are inputs of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

Part = TypeVar("Part")


class Loaded(NamedTuple):
    """A tensor of a checkpoint, and its name for errors."""

    name: str
    tensor: torch.Tensor  # on the device of the parameter


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Some rows or columns of a tensor."""

    rows: tuple[tuple[int, int], ...] | None = None  # (first, end) of each piece, ascending; None: all
    columns: tuple[int, int] | None = None  # (first, end); None: all

    def is_whole(self, num_rows: int) -> bool:
        """Whether it has all rows of so many."""
        return self.rows is None or self.rows == ((0, num_rows),)

    def of(self, tensor: Any) -> torch.Tensor:
        """The part of a tensor, or of what is indexed like one."""
        columns = () if self.columns is None else (slice(*self.columns),)
        if self.rows is None:
            return tensor[(slice(None), *columns)]
        pieces = [tensor[(slice(*piece), *columns)] for piece in self.rows]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that a checkpoint must have, in its own layout."""

    names: tuple[str, ...]  # alternatives: the first that the checkpoint has counts
    dtypes: tuple[str, ...]  # any of these, as safetensors names them
    shapes: tuple[tuple[int, ...], ...]  # any of these
    is_optional: bool = False
    part: TensorPart | None = None  # only this is read; None: all of it


@dataclass(frozen=True, slots=True)
class Conversion:
    """Makes rows of a parameter of one or several tensors of a checkpoint."""

    inputs: tuple[StoredTensor, ...]
    convert: Callable[..., torch.Tensor]  # takes a `Loaded` for each input, or None for an absent optional one


class StoredLayout(Protocol):
    """How a checkpoint stores a tensor, if it is not as we do."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the checkpoint of a tensor that has `shape` here."""

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        """The checkpoint's tensor, with its elements where we have them."""


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
