"""`Rank`: one of several pairs of a dense shard and an attention worker, which have parts of a model.

Tensor parallel ranks have parts of the same layers: attention heads are dealt to them in order. A stage of a pipeline
has some layers as a whole. `seam_config` is the model as a rank's attention worker sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from services.common.errors import ConfigError
from services.common.families.shape import LayerHeads, ModelConfig

if TYPE_CHECKING:
    from services.common.config import DenseSection


@dataclass(frozen=True, slots=True)
class Rank:
    """Which of how many."""

    index: int
    count: int
    is_stage: bool = False  # of a pipeline; otherwise of tensors

    @classmethod
    def of(cls, section: DenseSection, index: int) -> Self:
        """The rank with this number, of as many as the section asks for."""
        return cls(index, section.num_ranks, is_stage=section.pipeline_parallel_size > 1)

    @property
    def prefix(self) -> str:
        """What the names of a rank's own things begin with; empty if there is one rank."""
        return "" if self.count == 1 else f"rank-{self.index}-"

    def share(self, size: int, unit: int = 1) -> range:
        """This rank's part of `size` rows, which come in units of `unit` rows that are not cut; all for a stage.

        Fewer units than ranks are held by several ranks each. Raises `ConfigError` if they cannot be dealt equally.
        """
        if self.is_stage:
            return range(size)
        num_units = size // unit
        if num_units % self.count == 0:
            length = size // self.count
            return range(self.index * length, (self.index + 1) * length)
        if num_units and self.count % num_units == 0:
            first = self.index * num_units // self.count * unit
            return range(first, first + unit)
        raise ConfigError(f"{num_units} cannot be dealt to dense.tensor_parallel_size {self.count} ranks")

    def layers(self, num_layers: int) -> range:
        """This rank's layers: all, or those of a stage. The first stages have one more than the last ones, or as many.

        The last one has the product with the vocabulary besides.
        """
        if not self.is_stage:
            return range(num_layers)
        first, end = (-(-index * num_layers // self.count) for index in (self.index, self.index + 1))
        return range(first, end)


ALONE = Rank(0, 1)


def seam_config(config: ModelConfig, rank: Rank) -> ModelConfig:
    """The model with the heads or the layers of one rank: what crosses its seam, and what its KV cache holds."""
    if rank.count == 1:
        return config
    if rank.is_stage:
        return _with_layers(config, rank.layers(config.num_layers))
    options = config.attention
    own = rank.share(config.num_heads)
    attention = replace(
        options,
        alibi_slopes=tuple(options.alibi_slopes[own.start : own.stop]),
        layer_heads=tuple(_heads_of(heads, rank) for heads in options.layer_heads),
    )
    num_kv_heads = len(rank.share(config.num_kv_heads))
    return replace(config, num_heads=len(own), num_kv_heads=num_kv_heads, attention=attention)


def _heads_of(heads: LayerHeads, rank: Rank) -> LayerHeads:
    num_heads, num_kv_heads = len(rank.share(heads.num_heads)), len(rank.share(heads.num_kv_heads))
    return replace(heads, num_heads=num_heads, num_kv_heads=num_kv_heads)


def _with_layers(config: ModelConfig, layers: range) -> ModelConfig:
    """A model of these layers of another one, counted from 0 again."""
    first, end = layers.start, layers.stop
    options, parts = config.attention, config.parts

    def renumbered(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number - first for number in numbers if number in layers)

    def moved(heads: LayerHeads) -> LayerHeads:
        return heads if heads.kv_layer is None else replace(heads, kv_layer=heads.kv_layer - first)

    attention = replace(
        options,
        layer_ropes=options.layer_ropes[first:end],
        layer_heads=tuple(moved(heads) for heads in options.layer_heads[first:end]),
    )
    parts = replace(
        parts,
        experts=parts.experts and replace(parts.experts, layers=renumbered(parts.experts.layers)),
        key_value_layers=renumbered(parts.key_value_layers),
        layers_without_mlp=renumbered(parts.layers_without_mlp),
        blocks=parts.blocks[first:end],
        layer_intermediate_sizes=parts.layer_intermediate_sizes[first:end],
    )
    windows = config.sliding_windows[first:end]
    return replace(config, num_layers=len(layers), sliding_windows=windows, attention=attention, parts=parts)
