"""`Rank`: one of several pairs of a dense shard and an attention worker, which have parts of the same layers.

Attention heads are dealt to the ranks in order. `seam_config` is the model as a rank's attention worker sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.common.errors import ConfigError
from services.common.families.shape import LayerHeads, ModelConfig


@dataclass(frozen=True, slots=True)
class Rank:
    """Which of how many."""

    index: int
    count: int

    @property
    def prefix(self) -> str:
        """What the names of a rank's own things begin with; empty if there is one rank."""
        return "" if self.count == 1 else f"rank-{self.index}-"

    def share(self, size: int, unit: int = 1) -> range:
        """This rank's part of `size` rows, which come in units of `unit` rows that are not cut.

        Fewer units than ranks are held by several ranks each. Raises `ConfigError` if they cannot be dealt equally.
        """
        num_units = size // unit
        if num_units % self.count == 0:
            length = size // self.count
            return range(self.index * length, (self.index + 1) * length)
        if num_units and self.count % num_units == 0:
            first = self.index * num_units // self.count * unit
            return range(first, first + unit)
        raise ConfigError(f"{num_units} cannot be dealt to dense.tensor_parallel_size {self.count} ranks")


ALONE = Rank(0, 1)


def seam_config(config: ModelConfig, rank: Rank) -> ModelConfig:
    """The model with the heads of one rank: what crosses its seam, and what its KV cache holds."""
    if rank.count == 1:
        return config
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
