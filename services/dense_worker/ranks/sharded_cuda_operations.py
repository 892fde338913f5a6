"""`ShardedCudaOperations`: the operations of one rank's shards by fused kernels, and the sums over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.common.model_config import ModelConfig
from services.dense_worker.backends.cuda_operations import CudaOperations
from services.dense_worker.kernels.experts.routed_experts import RoutedExperts
from services.dense_worker.kernels.linear.linear import Cut, Linear
from services.dense_worker.kernels.norm.norm import HeadNorms, Norm
from services.dense_worker.model.operations import MlpInput, Residual
from services.dense_worker.parameters import Parameter
from services.dense_worker.ranks.group import RankGroup
from services.dense_worker.ranks.sharded_operations import SharedHeadNorms

if TYPE_CHECKING:
    from services.dense_worker.kernels.lora.cuda_lora import CudaLora


class ShardedCudaOperations(CudaOperations):
    """Sums are enqueued on the current stream, between the kernels, and captured with them.

    Before there are other ranks, while the fastest kernels are found, nothing is added up.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        max_num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        lora: CudaLora | None = None,
    ) -> None:
        """`config`: with the sizes of the rank's experts."""
        super().__init__(config, max_num_tokens, dtype, device, lora)
        self._vocab_size = vocab_size
        self._group: RankGroup | None = None

    def use_group(self, group: RankGroup) -> None:
        """Later steps run with these ranks."""
        self._group = group

    def share_tokens(self, token_ids: torch.Tensor) -> None:
        """Gives all ranks the tokens of the first one."""
        if self._group is not None:
            self._group.broadcast(token_ids)

    def embed(self, table: Parameter, token_ids: torch.Tensor) -> Residual:
        """Each row is that of the one rank that has the token."""
        index = 0 if self._group is None else self._group.rank.index
        own = token_ids - index * len(table.data)
        is_elsewhere = (own < 0) | (own >= len(table.data))
        residual = super().embed(table, own.masked_fill_(is_elsewhere, 0))
        residual.hidden.masked_fill_(is_elsewhere[:, None], 0.0)
        self._add_up(residual.hidden)
        return residual

    def linear(self, linear: Linear, x: MlpInput) -> torch.Tensor:
        """A new tensor."""
        product = super().linear(linear, x)
        if linear.cut is Cut.IN:
            self._add_up(product)
        return product

    def linear_add(
        self,
        residual: Residual,
        linear: Linear,
        x: MlpInput,
        norm: Norm | None = None,
        multiplier: float = 1.0,
    ) -> Residual:
        """Leaves the sum over the ranks as the delta: no kernel adds a rank's part to the residual."""
        hidden = self.settle(residual)
        delta = self._hidden[: len(hidden)]
        self._multiply(linear, x, delta)
        self._add_up(delta)
        return self.add(Residual(hidden), delta, norm, multiplier)

    def norm_heads(self, qkv: torch.Tensor, norms: HeadNorms, is_in_place: bool) -> torch.Tensor:
        """Those that cover all heads are operators of torch."""
        if isinstance(norms, SharedHeadNorms) and self._group is not None:
            return norms.normalize_over(self._group, qkv, is_in_place)
        return super().norm_heads(qkv, norms, is_in_place)

    def mix_experts(
        self,
        x: torch.Tensor,
        experts: RoutedExperts,
        shared: torch.Tensor | None,
        routed_by: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All ranks choose the same experts and have parts of each; `shared` is whole already."""
        total = super().mix_experts(x, experts, None, routed_by)
        self._add_up(total)
        return total if shared is None else total.add_(shared)

    def activate_experts(
        self, residual: Residual, norm: Norm | None, experts: RoutedExperts
    ) -> tuple[Residual, torch.Tensor]:
        """The sum: it is added to the residual when that of all ranks is known."""
        residual, x = self.normalize(residual, norm)
        return residual, self.mix_experts(x, experts, None)

    def logits(
        self, residual: Residual, norm: Norm | None, lm_head: Linear, hidden_out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Those of all ranks, on the first one."""
        own = super().logits(residual, norm, lm_head, hidden_out)
        if self._group is None:
            return own
        gathered = self._group.gather(own)
        return gathered if gathered.shape[1] == self._vocab_size else gathered[:, : self._vocab_size].contiguous()

    def _add_up(self, tensor: torch.Tensor) -> None:
        if self._group is not None:
            self._group.add(tensor)
