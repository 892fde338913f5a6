"""Loads a tower: its weights lie in the files of the whole model, and the launcher holds them as it does the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from services.common.errors import ModelError
from services.common.gpu import naming_what_needs_memory
from services.common.quantization.schemes import QuantizationConfig
from services.common.vision.vision_config import PixelScale, TowerConfig, VisionConfig
from services.dense_worker.encoders.vision.blip2 import build_blip2_tower
from services.dense_worker.encoders.vision.gemma3 import build_gemma3_tower
from services.dense_worker.encoders.vision.internvl import build_internvl_tower
from services.dense_worker.encoders.vision.llava import build_any_llava_tower, build_llava_next_tower
from services.dense_worker.encoders.vision.operations import TowerOperations
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.encoders.vision.pixtral import build_mistral3_tower
from services.dense_worker.encoders.vision.qwen_vl import build_qwen2_5_tower, build_qwen3_tower
from services.dense_worker.kernels.linear.linear import Linear, PlainWeight
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.model.checkpoint import open_checkpoint
from services.dense_worker.model.held_weights import HeldWeights
from services.dense_worker.model.weight_memory import Empty
from services.dense_worker.model.weights import RANDOM_STD, fill, places
from services.dense_worker.parameters import parameters, parts_of_type


class Tower(Protocol):
    """The parts of a tower: a frozen dataclass."""

    config: TowerConfig

    def parts(
        self, pictures: Sequence[Picture], pixels: PixelScale, operations: TowerOperations
    ) -> Generator[None, None, list[torch.Tensor]]:
        """Rows [`TowerConfig.num_outputs`, `TowerConfig.width`] of each picture, which are computed together.

        Yields between two layers, so that something else can run there.
        """


# Builds the parts of a family; its tensors have the names of transformers' newest files, without a leading "model.".
BUILDERS: dict[str, Callable[..., Tower]] = {
    "blip-2": build_blip2_tower,
    "gemma3": build_gemma3_tower,
    "internvl": build_internvl_tower,
    "llava": build_any_llava_tower,
    "llava_next": build_llava_next_tower,
    "llava_onevision": build_llava_next_tower,
    "mistral3": build_mistral3_tower,
    "qwen2_5_vl": build_qwen2_5_tower,
    "qwen3_vl": build_qwen3_tower,
    "qwen3_vl_moe": build_qwen3_tower,
}


@dataclass(frozen=True, slots=True)
class TowerWeights:
    """The tensors of a tower."""

    tower: Tower

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, numbered."""
        for index, parameter in enumerate(parameters(self.tower)):
            yield f"{index}.{parameter.name}", parameter.data


@dataclass(frozen=True, slots=True)
class StoredTower:
    """A tower of which no weights are in memory yet."""

    vision: VisionConfig
    path: Path
    dtype: torch.dtype
    device: torch.device
    seed: int | None  # of random weights; None: they are in the files
    quantization: QuantizationConfig | None = None  # that is made while they load

    def empty(self, device: torch.device, empty: Empty | None = None) -> TowerWeights:
        """Uninitialised. `empty` makes the tensors; None: each one has memory of its own."""
        allocator = WeightAllocator(self.dtype, device, self.quantization, empty)
        return TowerWeights(BUILDERS[self.vision.family](self.vision.tower, allocator))

    @property
    def num_bytes(self) -> int:
        """The size of its weights."""
        return sum(tensor.nbytes for _, tensor in self.empty(torch.device("meta")).named_tensors())

    def load(self, empty: Empty | None = None) -> TowerWeights:
        """With its weights. Raises `ModelError` for tensors that are missing or have another shape."""
        weights = self.empty(self.device, empty)
        if self.seed is not None:
            generator = torch.Generator(self.device).manual_seed(self.seed)
            quantized = [
                each.weight for each in parts_of_type(Linear, weights) if not isinstance(each.weight, PlainWeight)
            ]
            for weight in quantized:
                weight.fill_random(RANDOM_STD, generator)
            filled = {id(parameter.data) for parameter in parameters(tuple(quantized))}
            for name, tensor in weights.named_tensors():
                if re.search(r"norm\d?$", name):
                    tensor.fill_(1.0)
                elif id(tensor) not in filled:
                    tensor.normal_(std=RANDOM_STD, generator=generator)
            return weights
        with open_checkpoint(self.path, canonical) as checkpoint:
            found = [place for parameter in parameters(weights.tower) for place in places(parameter)]
            missing = [source.name for source, _ in found if source.name not in checkpoint]
            if missing:
                raise ModelError(f"{self.path} lacks {len(missing)} tensors of its tower, such as {missing[0]}")
            for source, place in found:
                fill(checkpoint, source, place)
        return weights


def load_tower(stored: StoredTower, held: HeldWeights[TowerWeights] | None) -> Tower:
    """`held`: its memory at the launcher; None: there is no launcher. Raises what `StoredTower.load` raises."""
    with naming_what_needs_memory("the tower"):
        return (stored.load() if held is None else held.get(stored.load)).tower


def canonical(name: str) -> str:
    """The name of a tensor of a tower, in whatever spelling files have it."""
    return name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)
