"""`GrammarMask`: allows only tokens that the grammar of an output lets follow. An editor of logits.

The masks are made on the host, which must know the tokens of all earlier steps by then. On a GPU the runner enqueues
the sampler of such a step late: when the step before has ended and its own layers run.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from services.dense_worker.features.grammar.sequence_grammar import SequenceGrammar
from services.dense_worker.sampling.logits_editor import EditedRows, EditedSequence, LogitsEditor
from services.dense_worker.sampling.upload import HostStages
from services.grammar.matcher import GrammarMatcher

# Allowed tokens whose logits are lower, such as those that other editors exclude, get this logit. So one of them is
# sampled if, and practically only if, the grammar allows no others.
FLOOR = -1e6


class GrammarMask(LogitsEditor):
    """Grammars by slot, on the host."""

    options = ("structured_output",)
    needs_float32 = False

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._grammars: list[GrammarMatcher | None] = [None] * num_slots
        self._apply_masks, self._stages = apply_masks, None
        if device.type == "cuda":
            from services.dense_worker.features.grammar import triton_token_mask

            self._apply_masks, self._stages = triton_token_mask.apply_masks, HostStages()

    @classmethod
    def compile_kernels(cls, vocab_size: int, device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
        """Warms up the kernel: the first form would keep all streams waiting."""
        from services.dense_worker.features.grammar import triton_token_mask

        triton_token_mask.compile_kernels(vocab_size, device, dtypes)

    def set(self, slot: int, sequence: EditedSequence) -> bool:
        """Stores the grammar."""
        [grammar] = [each for each in sequence.features if isinstance(each, SequenceGrammar)]
        self._grammars[slot] = grammar.matcher
        return True

    def apply(self, logits: torch.Tensor, rows: EditedRows) -> None:
        """Sets all tokens but those that may come next to -inf."""
        grammars = [self._grammars[slot] for slot in rows.slots.tolist()]
        num_words = max(-(-self._vocab_size // 32), grammars[0].num_words)  # they belong to one model
        take = torch.empty if self._stages is None else self._stages.take
        packed = take(len(grammars) * (num_words + 1), dtype=torch.int32)
        masks, indexes = packed[: -len(grammars)].view(-1, num_words), packed[-len(grammars) :]
        GrammarMatcher.fill_masks(grammars, masks.numpy().view(np.uint32))
        indexes.numpy()[:] = rows.rows
        self._apply_masks(logits, indexes, masks, max(FLOOR, torch.finfo(logits.dtype).min))
        if self._stages is not None:
            self._stages.note_read()

    def forget(self, slot: int) -> None:
        """Gives up the grammar: its lexer may have 25 MB, and counts who shares it."""
        self._grammars[slot] = None


def apply_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor, floor: float) -> None:
    """Sets logits without a bit to -inf, and others below `floor` to `floor`; in place.

    logits: [r, vocab_size], of any float type; rows: integers [n], indices into logits; masks: int32 [n, at least
    vocab_size / 32], the bit of token t is bit t % 32 of word t / 32
    """
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    is_allowed = (masks[:, :, None] >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[rows] = torch.where(is_allowed, logits[rows].clamp(min=floor), -torch.inf)
