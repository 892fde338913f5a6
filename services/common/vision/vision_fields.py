"""`VisionFields`: the fields of config.json and of the image processor that say how a model sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import ModelError
from services.common.families.kinds import Activation

MAX_SIZE = 2**20  # of a tower's sizes
BICUBIC = 3  # as Pillow numbers it
_ACTIVATIONS = {  # by transformers' names
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "quick_gelu": Activation.QUICK_GELU,
}


@dataclass(frozen=True, slots=True)
class VisionFields:
    """What transformers made of the files in `path`."""

    path: Path
    outer: Mapping[str, Any]  # of config.json
    tower: Mapping[str, Any]  # its vision_config
    processor: Mapping[str, Any]  # of the image processor, as `read_processor` gives them

    def size(self, name: str) -> int:
        """A whole number of at least 1 in the tower's config. Raises `ModelError` for anything else."""
        value = self.tower.get(name)
        if type(value) is not int or not 1 <= value <= MAX_SIZE:
            raise self.error(name, value, f"expected a whole number from 1 to {MAX_SIZE}")
        return value

    def square(self, name: str) -> int:
        """A size of both sides in the tower's config, which may be written as a pair of equal numbers."""
        value = self.tower.get(name)
        sides = value if isinstance(value, list | tuple) else (value,)
        if len(set(sides)) != 1 or type(sides[0]) is not int or not 1 <= sides[0] <= MAX_SIZE:
            raise self.error(name, value, f"expected a whole number from 1 to {MAX_SIZE}, or two equal ones")
        return sides[0]

    def activation(self, fields: Mapping[str, Any], name: str) -> Activation:
        """The function that a field of `fields` names. Raises `ModelError` for one that is not supported."""
        if (value := fields.get(name)) not in _ACTIVATIONS:
            raise self.error(name, value, f"supported: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def num_computed_layers(self) -> int:
        """How many layers give the rows that `vision_feature_layer` names. Raises `ModelError` for none of them.

        Hidden states are counted from the embedding: -1 is what the last layer gives.
        """
        layer, num_layers = self.outer["vision_feature_layer"], self.size("num_hidden_layers")
        if type(layer) is not int or not -num_layers <= layer <= num_layers:
            raise self.error("vision_feature_layer", layer, f"expected one layer from {-num_layers} to {num_layers}")
        return layer if layer >= 0 else num_layers + 1 + layer

    def only_square(self, name: str, side: int) -> None:
        """Refuses a size of the processor's pictures, if it has one, other than a square with this side."""
        size = self.processor.get(name) or {"height": side, "width": side}
        self.only(name, (size.get("height"), size.get("width")), (side, side))

    @property
    def resample(self) -> int:
        """The filter for resizing."""
        return self.processor.get("resample", BICUBIC)

    def only(self, name: str, value: Any, *supported: Any) -> None:
        """Refuses a value other than these."""
        if value not in supported:
            raise self.error(name, value, f"supported: {', '.join(map(str, supported))}")

    def error(self, name: str, value: Any, expected: str) -> ModelError:
        return ModelError(f"{self.path} has {name} {value!r} for pictures, {expected}")
