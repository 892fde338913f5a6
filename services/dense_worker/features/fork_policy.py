"""`ForkPolicy`: which sequences are not opened, but forked from running ones. Part of the scheduler.

`ParallelAnswers` are answers to one prompt, which compute it once. The first one that is opened computes the prompt
like any sequence. The others *join* it: they take their places and blocks, and wait. When the prompt is computed, each
of them is forked at its last token, which it computes itself, with its own sampling, in one row of a step. It shares
all full blocks before that token.

A sequence joins only if it has none of its own keys and values to go back to and needs only the prompt's last row: it
has no output, is not held in the cache from before the attachment, and reports nothing about its prompt. It is no
suspect, which runs alone. Every other sequence is opened by itself; so is one if all others have left the cache. No
sequence joins in a model with gated delta layers: their states cannot be forked before the end of what is computed.
"""

from __future__ import annotations

from collections import defaultdict

from services.dense_worker.engine.plan_builder import PlanBuilder
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.session import Session


class ForkPolicy:
    """Of all sequences of a worker: every one is opened. Subclasses fork some. Engine thread.

    A sequence that will be forked is RUNNING from its turn on, with its places and blocks, and is part of
    `Session.to_fork` until it gets its first row.
    """

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits."""

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended."""

    def num_shared_blocks(self, sequence: Sequence, session: Session) -> int:
        """The blocks that a waiting sequence need not be promised, because it would share them."""
        return 0

    def source_of(self, sequence: Sequence, session: Session) -> Sequence | None:
        """The sequence from which a waiting one would be forked, if its KV cache has room; None: it is opened."""
        return None

    def takes(self, sequence: Sequence, session: Session) -> bool:
        """Whether a sequence that has its turn will be forked; then it is part of `Session.to_fork` from now on.

        Only in the KV cache that it names: beside a full one it is opened in another.
        """
        return False

    def plan(self, step: PlanBuilder, session: Session) -> list[Sequence]:
        """Adds forks and the first rows of what is forked to a step. Returns those that cannot be forked any more."""
        return []


class ParallelAnswers(ForkPolicy):
    """All live sequences that are one of several answers."""

    def __init__(self) -> None:
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

    def num_shared_blocks(self, sequence: Sequence, session: Session) -> int:
        """The blocks that a waiting sequence need not be promised, because its source has them.

        Blocks that a window leaves behind count for nothing: the source may have dropped them before the fork.
        """
        if session.sliding_window.window is not None or self.source_of(sequence, session) is None:
            return 0
        return (sequence.num_prompt_tokens - 1) // session.ledger.block_size

    def source_of(self, sequence: Sequence, session: Session) -> Sequence | None:
        """The answer from which another one can be forked, now or when the prompt is computed; None: there is none."""
        if not (sequence.group_id and _may_join(sequence, session)):
            return None
        return next((each for each in self._groups[sequence.group_id] if is_source(each, session)), None)

    def takes(self, sequence: Sequence, session: Session) -> bool:
        """Whether a sequence joins another one now; then it will be forked at the last token of its prompt."""
        source = self.source_of(sequence, session)
        if source is None or source.cache_id != sequence.cache_id:
            return False
        session.to_fork[sequence] = source
        sequence.num_computed_tokens = sequence.num_prompt_tokens - 1
        return True

    def plan(self, step: PlanBuilder, session: Session) -> list[Sequence]:
        """Forks the sequences whose sources have computed the prompt. Returns those that have lost every source."""
        lost = []
        for sequence, source in list(session.to_fork.items()):
            if not is_source(source, session):
                other = self.source_of(sequence, session)
                if other is None or other.cache_id != sequence.cache_id:
                    lost.append(sequence)
                else:
                    session.to_fork[sequence] = other
            elif source.num_computed_tokens >= sequence.num_computed_tokens and min(step.num_tokens, step.num_logits):
                _fork(sequence, source, step, session)
        return lost


def is_source(sequence: Sequence, session: Session) -> bool:
    """Whether a sequence has the keys and values of its prompt, or is computing them."""
    if sequence.status not in (SequenceStatus.OPENING, SequenceStatus.RUNNING) or sequence in session.to_fork:
        return False
    position, layers = sequence.num_prompt_tokens - 1, session.layer_sliding_window
    if sequence.num_evicted_blocks > session.sliding_window.num_unread_blocks(position):
        return False
    # The attention worker drops these blocks by the tokens that it has computed, which are no more than were planned.
    num_dropped = layers.num_unread_blocks(sequence.num_opened_tokens)
    num_dropped = max(num_dropped, layers.num_evicted_blocks(sequence.num_computed_tokens))
    return num_dropped <= layers.num_unread_blocks(position)


def _may_join(sequence: Sequence, session: Session) -> bool:
    return (
        sequence.num_prompt_tokens > 1
        and not sequence.output_token_ids
        and not any(each.reports_prompt for each in sequence.features)
        and not sequence.is_suspect
        and sequence.seq_id not in session.orphaned_blocks
    )


def _fork(sequence: Sequence, source: Sequence, step: PlanBuilder, session: Session) -> None:
    """Adds the fork of a sequence to a step, and its first row, for the last token of its prompt."""
    session.enter_cache(sequence)
    sequence.num_cached_tokens = source.num_cached_tokens
    sequence.num_evicted_blocks = source.num_evicted_blocks
    position = sequence.num_computed_tokens
    sequence.num_blocks = position // session.ledger.block_size - sequence.num_evicted_blocks
    num_blocks = session.take_blocks(sequence, 1)
    assert num_blocks == 1, "a joining sequence has a block reserved"
    step.fork(source.seq_id, sequence.seq_id, position)
    step.force(sequence.seq_id, (sequence.spec.prompt_token_ids[position],))
    step.add(sequence, 1, (), 1, num_blocks, session.evict_blocks(sequence))
