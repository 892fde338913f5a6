"""`Siblings`: answers to one prompt, which compute it once. Part of the scheduler.

The first answer that is opened computes the prompt like any sequence. The others *join* it: they take their places and
blocks, and wait. When the prompt is computed, each of them is forked at its last token, which it computes itself, with
its own sampling, in one row of a step. It shares all full blocks before that token.

A sequence joins only if it has none of its own keys and values to go back to and needs only the prompt's last row: it
has no output, is not held in the cache from before the attachment, and reports nothing about its prompt. It is no
suspect, which runs alone. Every other sequence is opened by itself; so is one whose siblings have all left the cache.
No sequence joins in a model with gated delta layers: their states cannot be forked before the end of what is computed.
"""

from __future__ import annotations

from collections import defaultdict

from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.session import Session


class Siblings:
    """All live sequences that have siblings."""

    def __init__(self, *, can_join: bool = True) -> None:
        """`can_join`: whether the model's sequences can be forked within their prompts."""
        self._can_join = can_join
        self._groups = defaultdict[int, list[Sequence]](list)  # by group_id

    def add(self, sequence: Sequence) -> None:
        """Adds a new sequence."""
        if sequence.group_id:
            self._groups[sequence.group_id].append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        if sequence.group_id:
            self._groups[sequence.group_id].remove(sequence)
            if not self._groups[sequence.group_id]:
                del self._groups[sequence.group_id]

    def source_of(self, sequence: Sequence, session: Session) -> Sequence | None:
        """The sibling from which a sequence can be forked, now or when the prompt is computed; None: it has none.

        There is none where sequences cannot join.
        """
        if not (self._can_join and sequence.group_id and _may_join(sequence, session)):
            return None
        return next((each for each in self._groups[sequence.group_id] if is_source(each, session)), None)

    def num_shared_blocks(self, sequence: Sequence, session: Session) -> int:
        """The blocks that a waiting sequence need not be promised, because its source has them.

        Blocks that a window leaves behind count for nothing: the source may have dropped them before the fork.
        """
        if session.ledger.retention.window is not None or self.source_of(sequence, session) is None:
            return 0
        return (sequence.num_prompt_tokens - 1) // session.ledger.block_size


def is_source(sequence: Sequence, session: Session) -> bool:
    """Whether a sequence has the keys and values of its prompt, or is computing them."""
    if sequence.status not in (SequenceStatus.OPENING, SequenceStatus.RUNNING) or sequence in session.joining:
        return False
    position, layers = sequence.num_prompt_tokens - 1, session.layer_retention
    if sequence.num_dropped_blocks > session.ledger.retention.num_unread_blocks(position):
        return False
    # The attention worker drops these blocks by the tokens that it has computed, which are no more than were planned.
    num_dropped = layers.num_unread_blocks(sequence.num_opened_tokens)
    num_dropped = max(num_dropped, layers.num_dropped_blocks(sequence.num_computed_tokens))
    return num_dropped <= layers.num_unread_blocks(position)


def _may_join(sequence: Sequence, session: Session) -> bool:
    return (
        sequence.num_prompt_tokens > 1
        and not sequence.output_token_ids
        and not sequence.reports_prompt_logprobs
        and not sequence.token_report
        and not sequence.is_suspect
        and sequence.seq_id not in session.held_blocks
    )
