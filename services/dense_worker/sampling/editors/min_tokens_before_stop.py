"""`MinTokensBeforeStop`: forbids stop tokens at the beginning of an output. An editor of logits."""

from __future__ import annotations

from dataclasses import replace

from services.dense_worker.sampling.editors.min_tokens import MinTokens
from services.dense_worker.sampling.logits_editor import EditedSequence


class MinTokensBeforeStop(MinTokens):
    """Does to logits what `MinTokens` does, for another option."""

    order = 45

    def set(self, slot: int, sequence: EditedSequence) -> bool:
        """Stores the number and the stop tokens."""
        params = replace(sequence.params, min_tokens=sequence.params.min_tokens_before_stop)
        return super().set(slot, replace(sequence, params=params))
