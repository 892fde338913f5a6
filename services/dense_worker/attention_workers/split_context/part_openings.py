"""`PartOpenings`: makes one answer of those that several attention workers give to the parts of a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.common.errors import PeerError
from services.step import NewSequence, SequenceOpened


class PartOpenings:
    """On the event loop."""

    def __init__(self) -> None:
        self._missing: dict[int, set[int]] = {}  # by seq_id: cache_ids whose answers are still out
        self._num_blocks: dict[int, int] = {}  # by seq_id: of the parts that are open

    def expect(self, new_sequences: Iterable[NewSequence]) -> None:
        """These are being opened."""
        opening: dict[int, set[int]] = {}
        for each in new_sequences:
            if each.part is not None:
                opening.setdefault(each.seq_id, set()).add(each.cache_id)
        self._missing |= opening
        self._num_blocks |= dict.fromkeys(opening, 0)

    def note(self, answer: SequenceOpened) -> SequenceOpened | None:
        """The answer for the whole sequence, when the last one has come; of a sequence without parts its own.

        Raises `PeerError` if a worker refuses a part, for which it was counted to have room.
        """
        missing = self._missing.get(answer.seq_id)
        if missing is None or answer.cache_id not in missing:
            return answer
        if answer.error is not None:
            raise PeerError(f"a part of sequence {answer.seq_id:x} was refused: {answer.error}")
        missing.remove(answer.cache_id)
        self._num_blocks[answer.seq_id] += answer.num_held_blocks
        if missing:
            return None
        del self._missing[answer.seq_id]
        num_blocks = self._num_blocks.pop(answer.seq_id)
        return replace(answer, num_pinned_blocks=num_blocks, num_held_blocks=num_blocks)

    def lose(self, cache_id: int) -> None:
        """A worker is gone: sequences of which it was to open a part are opened again."""
        for seq_id in [seq_id for seq_id, missing in self._missing.items() if cache_id in missing]:
            del self._missing[seq_id], self._num_blocks[seq_id]
