"""`PictureTokenEncoder`: an encoder of tokens some of which stand for pictures, as Flan-T5 within BLIP-2."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from services.common.vision.vision_config import VisionConfig
from services.dense_worker.encoders.source.source_encoder import SequenceEncoder
from services.dense_worker.encoders.vision.blip2 import Blip2VisionTower
from services.dense_worker.encoders.vision.operations import TorchTowerOperations
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.model.operations import Operations
from services.dense_worker.parameters import Parameter, parameters


@dataclass(frozen=True, slots=True, eq=False)
class SourceTokens:
    """What such an encoder reads."""

    ids: torch.Tensor  # int64 [length], on the encoder's device
    pictures: tuple[Picture, ...]  # in the order of their tokens

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class PictureTokenEncoder:
    """A `Body`: the tower computes the rows of pictures, which take the place of their tokens' rows."""

    inner: SequenceEncoder
    tower: Blip2VisionTower
    vision: VisionConfig

    def num_rows(self, source: SourceTokens) -> int:
        """The rows of an input."""
        return len(source)

    def num_inner_rows(self, source: SourceTokens) -> int:
        """Its rows, or all patches of its pictures."""
        return max(len(source), sum(self.tower.config.num_patches(each.shape) for each in source.pictures))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters; those of the tower are numbered."""
        yield from self.inner.named_parameters()
        for index, parameter in enumerate(parameters(self.tower)):
            yield f"tower.{index}.{parameter.name}", parameter

    def parts(
        self, operations: Operations, inputs: Sequence[SourceTokens], max_products: int
    ) -> Generator[None, None, torch.Tensor]:
        """The output of all inputs, one after the other: [n, hidden]. Yields after each layer, also of the tower."""
        ids = [each.ids for each in inputs]
        rows = self.inner.rows.forward(ids)
        if pictures := [picture for each in inputs for picture in each.pictures]:
            found = yield from self.tower.parts(pictures, self.vision.pixels, TorchTowerOperations())
            is_picture = torch.cat(ids) == self.vision.image_token_id
            rows = rows.masked_scatter(is_picture[:, None], torch.cat(found))
        return (yield from self.inner.encode(operations, rows, list(map(len, inputs))))
