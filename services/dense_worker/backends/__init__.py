"""The protocol between the dense worker's step and the backends that compute the segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

from services.step import StepPlan


class InputEmbeds(NamedTuple):
    """Vectors for e rows of a step, in place of the embeddings of their tokens, in the model's dtype."""

    rows: torch.Tensor  # int64 [e], all different
    vectors: torch.Tensor  # [e, hidden]
    deep: torch.Tensor | None = None  # [num_layers, e, hidden]: added to the residual after the first layers

    def upload(self, device: torch.device) -> InputEmbeds:
        """The same on a GPU. Enqueues copies from the host of what is not there."""
        # torch keeps pinned memory until the copy is done.
        return InputEmbeds(
            *(
                each if each is None or each.is_cuda else each.pin_memory().to(device, non_blocking=True)
                for each in self
            )
        )

    def put_into(self, hidden: torch.Tensor) -> None:
        """Overwrites rows of hidden [n, hidden]."""
        hidden.index_copy_(0, self.rows, self.vectors)

    def after_layer(self, layer: int) -> InputEmbeds | None:
        """What is added to rows after a layer, counted from 0; None: nothing."""
        if self.deep is None or layer >= len(self.deep):
            return None
        return InputEmbeds(self.rows, self.deep[layer])

    @classmethod
    def join(cls, given: Sequence[InputEmbeds]) -> InputEmbeds | None:
        """Those of several features, whose rows are all different; None if there are none."""
        if len(given) < 2:
            return given[0] if given else None
        device = next((each.vectors.device for each in given if each.vectors.is_cuda), given[0].vectors.device)
        vectors = [each.vectors.to(device) for each in given]
        deep = next((each.deep for each in given if each.deep is not None), None)
        if deep is not None:
            absent = [deep.new_zeros(len(deep), len(each.rows), deep.shape[2]) for each in given]
            deep = torch.cat([zeros if e.deep is None else e.deep for e, zeros in zip(given, absent, strict=True)], 1)
        return cls(torch.cat([each.rows for each in given]), torch.cat(vectors), deep)


class CapturedEmbeds(NamedTuple):
    """The same for any of a captured step's n rows."""

    is_given: torch.Tensor  # bool [n, 1]
    vectors: torch.Tensor  # [n, hidden]; arbitrary where none is given

    def put_into(self, hidden: torch.Tensor) -> None:
        """Overwrites rows of hidden [n, hidden]."""
        torch.where(self.is_given, self.vectors, hidden, out=hidden)

    def after_layer(self, layer: int) -> None:
        """Nothing is added later."""


GivenEmbeds: TypeAlias = InputEmbeds | CapturedEmbeds


class DenseBackend(Protocol):
    """Runs a model's dense stroke: `first`, `middle` for every layer but the last, `last`. For one stream.

    All tensors are on the backend's device, n tokens of all sequences concatenated, activations in the model's dtype.
    The channel owns `qkv_out` and `attn_out`. The step owns the residual: each call takes the residual that the
    previous call returned, may overwrite it, and returns the next one. A backend keeps no residual, so several steps
    may be in flight. No method waits for the device. `first`, `middle` and `last` may be captured in a CUDA graph,
    which is then valid only for the numbers of tokens and rows of its capture. Each must have run for these numbers
    before, `middle` for one layer.
    """

    takes_input_embeds: bool  # whether `first` may be given any
    captures_embeds: bool  # whether `first` may be captured with `CapturedEmbeds`
    gives_hidden_states: bool  # whether `last` may be given `hidden_out`
    logits_dtype: torch.dtype  # of most logits that `last` gives; float32 has room for all
    always_ends: bool  # whether `last` is called also if no token needs logits: another process goes on from there
    skips_logits: bool  # whether a step may have `hidden` and no `last`, and whether `hidden` may be captured

    def begin_step(
        self, plan: StepPlan, num_tokens: int, num_sampled: int = 0, input_embeds: InputEmbeds | None = None
    ) -> None:
        """Prepares a step of `num_tokens` tokens (padding included) on the host. Called once before each step.

        num_sampled: rows of its first call of `last` (padding included); 0: it is not called
        input_embeds: what `first` will be given, perhaps on another device

        It is never captured. It prepares everything that differs between two steps of one captured graph, such as the
        adapter of each row, and copies it to where the graph reads it.
        """

    def first(
        self, token_ids: torch.Tensor, qkv_out: torch.Tensor, input_embeds: GivenEmbeds | None = None
    ) -> torch.Tensor:
        """token_ids int64 [n]; writes the qkv of layer 0 into qkv_out [n, qkv_size] -> a new residual [n, hidden].

        input_embeds: their rows have any valid token ids. During a capture only `CapturedEmbeds`.
        """

    def middle(
        self,
        layer: int,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        qkv_out: torch.Tensor,
        added: InputEmbeds | None = None,
    ) -> torch.Tensor:
        """Finishes `layer` from attn_out [n, attn_size]; writes the qkv of `layer + 1` -> the residual [n, hidden].

        `added`: vectors that are added to rows between the two layers, only if `first` may be given some.
        """

    def last(
        self,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        rows: torch.Tensor,
        hidden_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """rows int64 [r] of the step's tokens -> logits [r, vocab], float32 or the model's dtype; the caller's.

        The rows' hidden states after the final norm are written to hidden_out [r, hidden], if that is given: see
        `gives_hidden_states`.
        Does not change the residual. It is not called if no token of the step needs logits, unless `always_ends` is
        true, and called several times if more rows need logits than fit into one call.
        """

    def hidden(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden_out: torch.Tensor
    ) -> None:
        """Like `last` without logits: only hidden_out [r, hidden] is written, for any number of rows up to the step's.

        Called only if `gives_hidden_states` is true.
        """
