"""`LeadingBackend`: the first rank's backend, at whose calls the shards of all other ranks run the same segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

import torch

from services.dense_worker.backends import DenseBackend, InputEmbeds
from services.dense_worker.kernels.lora.tensors import LoraStore
from services.dense_worker.ranks.group import RankGroup
from services.lora.adapter import Adapter
from services.pb import shard_pb2
from services.step import StepPlan
from services.step.codec import encode_plan

_HIDDEN_AT_A_TIME = 256  # rows, so that their logits take limited memory


@dataclass(frozen=True, slots=True)
class LeadingRanks:
    """The other ranks of an attachment, as a lane of the first one meets them. `send` gives all of them a command.

    `load_adapter` lets them load their parts of an adapter into a slot that no step uses; any thread may call it. The
    future has the error why one cannot, or is cancelled if the attachment ends.
    """

    groups: Sequence[RankGroup]  # by lane
    send: Callable[[shard_pb2.ShardCommand], None]
    load_adapter: Callable[[int, Adapter], Future[None]]
    lane: int = 0

    @property
    def group(self) -> RankGroup:
        """That of the lane."""
        return self.groups[self.lane]

    def of_lane(self, lane: int) -> Self:
        """The same ranks, as another lane meets them."""
        return replace(self, lane=lane)

    def abort(self) -> None:
        """Releases whoever waits for another rank, in all lanes. May be called from any thread."""
        for each in self.groups:
            each.abort()


class ShardOperations(Protocol):
    """What reaches the other ranks: operations that add up over them, or links that pass rows on to the next one."""

    def use_group(self, group: RankGroup) -> None:
        """Later steps run with these ranks."""

    def share_tokens(self, token_ids: torch.Tensor) -> None:
        """Gives the step's tokens, int64 [n], to all ranks that read them. All ranks call it."""


class LeadingBackend:
    """A DenseBackend around that of the rank's own shard.

    The other ranks have no scheduler and no sampler. They get each step's plan, and its tokens from this rank. Before
    there are other ranks, while kernels are loaded, it runs alone.
    """

    takes_input_embeds = True
    shares_vectors: ClassVar[bool] = True  # with ranks that have parts of the same layers
    captures_embeds = always_ends = skips_logits = False

    def __init__(self, backend: DenseBackend, operations: ShardOperations, lora: LoraStore | None = None) -> None:
        """`operations` and `lora`: those of the backend."""
        self.gives_hidden_states, self.logits_dtype = backend.gives_hidden_states, backend.logits_dtype
        self._backend = backend
        self._operations = operations
        self._lora = lora
        self._ranks: LeadingRanks | None = None
        self._needs_logits = False  # the present step, of rows that its plan names
        self._has_logits = False  # it has them, or needs none

    @property
    def ranks(self) -> LeadingRanks:
        """Those of the present attachment."""
        assert self._ranks is not None, "there is an attachment before there is a step"
        return self._ranks

    def use_ranks(self, ranks: LeadingRanks) -> None:
        """Later steps run with these ranks."""
        self._ranks = ranks
        self._operations.use_group(ranks.group)

    def begin_step(
        self, plan: StepPlan, num_tokens: int, num_sampled: int = 0, input_embeds: InputEmbeds | None = None
    ) -> None:
        """Lets all ranks begin the step. A plan without entries, which warms up, may be of any lane."""
        self._needs_logits = self.always_ends or num_sampled > 0
        if self._ranks is not None:
            self._tell(self._ranks, plan, num_tokens, num_sampled, input_embeds)
        self._backend.begin_step(plan, num_tokens, num_sampled, input_embeds)

    def first(
        self, token_ids: torch.Tensor, qkv_out: torch.Tensor, input_embeds: InputEmbeds | None = None
    ) -> torch.Tensor:
        """Gives the ranks the tokens, and the vectors that some rows have."""
        self._has_logits = not self._needs_logits
        self._operations.share_tokens(token_ids)
        if input_embeds is None:
            return self._backend.first(token_ids, qkv_out)
        if self.shares_vectors:
            for each in (input_embeds.vectors, input_embeds.deep):
                if each is not None:
                    self.ranks.group.broadcast(each.contiguous())
        return self._backend.first(token_ids, qkv_out, input_embeds)

    def middle(
        self,
        layer: int,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        qkv_out: torch.Tensor,
        added: InputEmbeds | None = None,
    ) -> torch.Tensor:
        """The shard's part; all ranks run it."""
        return self._backend.middle(layer, attn_out, residual, qkv_out, added)

    def last(
        self,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        rows: torch.Tensor,
        hidden_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The shard's part. The other ranks know the step's sampled rows, if it has any, and are told of further ones.
        """
        if self._has_logits:
            further = shard_pb2.FurtherRows(rows=rows.tolist(), lane=self.ranks.lane)
            self.ranks.send(shard_pb2.ShardCommand(further_rows=further))
        self._has_logits = True
        return self._backend.last(attn_out, residual, rows, hidden_out)

    def hidden(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden_out: torch.Tensor
    ) -> None:
        """With logits, some rows at a time: they are the further rows that the other ranks know to compute."""
        self._has_logits = True  # or the step needed none
        for some_rows, out in zip(rows.split(_HIDDEN_AT_A_TIME), hidden_out.split(_HIDDEN_AT_A_TIME), strict=True):
            self.last(attn_out, residual, some_rows, out)

    def _tell(
        self,
        ranks: LeadingRanks,
        plan: StepPlan,
        num_tokens: int,
        num_sampled: int,
        input_embeds: InputEmbeds | None,
    ) -> None:
        plan = plan if plan.lane == ranks.lane else replace(plan, lane=ranks.lane)
        step = shard_pb2.ShardStep(
            plan=encode_plan(plan),
            num_rows=num_tokens,
            num_sampled=num_sampled,
            row_slots=self._row_slots(plan, num_tokens),
        )
        if input_embeds is not None and self.shares_vectors:
            num_deep = 0 if input_embeds.deep is None else len(input_embeds.deep)
            size = input_embeds.vectors.shape[1]
            vectors = shard_pb2.StepVectors(rows=input_embeds.rows.tolist(), size=size, num_deep=num_deep)
            step.vectors.CopyFrom(vectors)
        ranks.send(shard_pb2.ShardCommand(step=step))

    def _row_slots(self, plan: StepPlan, num_rows: int) -> Iterable[int]:
        """The slots of the step's rows. What only warms up the kernels of adapters has rows without any."""
        if self._lora is None or not self._lora.is_active:
            return ()
        if not len(plan.entries):
            return [-1] * num_rows
        slots = [] if self._lora.row_slots is None else self._lora.row_slots.tolist()
        assert len(slots) == num_rows, f"step {plan.step_id} has {num_rows} rows, and {len(slots)} have slots"
        return slots
