"""`StageLinks`: what a stage of a pipeline exchanges with the stages beside it, and logits with the first one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.dense_worker.ranks.group import RankGroup


class StageLinks:
    """Of one stage. Before there are other stages, while the fastest kernels are found, nothing is exchanged.

    `num_sampled`: rows of the present step whose logits the last stage computes; set before each step.
    """

    def __init__(self, logits_dtype: torch.dtype) -> None:
        """`logits_dtype`: of logits that are not rescaled; others are in float32."""
        self.num_sampled = 0
        self._logits_dtype = logits_dtype
        self._group: RankGroup | None = None
        self._end_of_logits: Callable[[], None] | None = None  # waits for those that are under way

    def use_group(self, group: RankGroup) -> None:
        """Later steps run with these stages."""
        self._group, self._end_of_logits = group, None

    def share_tokens(self, token_ids: torch.Tensor) -> None:
        """Nothing: the first stage alone reads tokens."""

    def receive_residual(self, hidden: torch.Tensor) -> None:
        """Fills hidden [n, hidden] with the residual of the stage before. Raises as `RankGroup.receive`."""
        if self._group is None:
            hidden.normal_()
        else:
            self._group.receive(hidden, self._group.rank.index - 1)

    def send_residual(self, hidden: torch.Tensor) -> None:
        """Gives the residual [n, hidden] to the next stage."""
        if self._group is not None:
            self._group.send(hidden, self._group.rank.index + 1)

    def receive_logits(self, like: torch.Tensor, vocab_size: int, *, in_float32: bool) -> torch.Tensor:
        """On the first stage the logits [num_sampled, vocab_size] of the last one, on the device of `like`.

        They are there after `await_logits`. Without meaning before there are other stages; these get no rows.
        """
        is_first = self._group is None or self._group.rank.index == 0
        dtype = torch.float32 if in_float32 else self._logits_dtype
        logits = torch.empty(self.num_sampled if is_first else 0, vocab_size, dtype=dtype, device=like.device)
        if self._group is not None and len(logits):
            self._end_of_logits = self._group.begin_receive(logits, self._group.rank.count - 1)
        return logits

    def await_logits(self) -> None:
        """Waits for the logits that are under way; on a GPU they come in the order of its stream.

        Raises as `RankGroup.receive`.
        """
        end, self._end_of_logits = self._end_of_logits, None
        if end is not None:
            end()

    def send_logits(self, logits: torch.Tensor) -> None:
        """Gives logits [n, vocab] to the first stage."""
        if self._group is not None and len(logits):
            self._group.send(logits.contiguous(), 0)
