"""`SequenceSource`: what one sequence reads of its encoder. The scheduler plans with it, so it needs no torch."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from services.dense_worker.features.sequence_feature import PlannedSequence, SequenceFeature, StepInPlanning

if TYPE_CHECKING:
    import torch

    from services.dense_worker.encoders.source.picture_tokens import SourceTokens
    from services.dense_worker.features.source.alignment import Alignment
    from services.step import SequenceOpened

_Key = tuple[int, bytes]  # the KV cache, and the content


class Readers:
    """The running sequences of a worker because of which a KV cache has an encoder's output, or a plan writes it."""

    def __init__(self) -> None:
        self.num_aligned = 0  # running sequences with an alignment
        self._seq_ids = defaultdict[_Key, dict[int, None]](dict)

    def add(self, key: _Key, seq_id: int) -> None:
        """From now on a sequence keeps the output in the cache."""
        self._seq_ids[key][seq_id] = None

    def remove(self, key: _Key, seq_id: int) -> None:
        """It does no more."""
        del self._seq_ids[key][seq_id]
        if not self._seq_ids[key]:
            del self._seq_ids[key]

    def any_of(self, key: _Key) -> int | None:
        """The seq_id of one that keeps it; None: no sequence does."""
        return next(iter(self._seq_ids.get(key, ())), None)


class SequenceSource(SequenceFeature):
    """Holds what the encoder reads, on the host, until the sequence ends: it may have to be read again.

    The first step of a sequence writes the output to the KV cache, unless it is there because of another sequence. One
    with an alignment has no output, and its first step runs the encoder in any case: it needs the keys here.
    """

    def __init__(
        self,
        source: torch.Tensor | SourceTokens,
        num_rows: int,
        readers: Readers,
        alignment: Alignment | None = None,
    ) -> None:
        """source: int64 [length] token ids, or these with pictures, float32 [num_mel_bins, length] features of sound,
        or the bytes of a picture

        num_rows: of the output; readers: those of the worker; alignment: None: it is not asked for
        """
        self.source = source
        self.alignment = alignment
        self.reports = self.reports_prompt = self.ignores_prefix_cache = alignment is not None
        self.has_output = alignment is None
        self.num_extra_rows = num_rows
        self._readers = readers
        self._is_missing = False  # the output is not in the cache, and no plan writes it for this sequence
        self._kept: tuple[_Key, int] | None = None  # what is kept in the cache because of which seq_id

    @property
    def joins_prompts(self) -> bool:
        """Whether its first step may run the encoder."""
        return self._is_missing

    @property
    def allows_drafts(self) -> bool:
        """Not in the step that runs the encoder."""
        return not self._is_missing

    def enter(self) -> None:
        """Counts it among those with an alignment, if it has one."""
        self._readers.num_aligned += self.alignment is not None

    def opened(self, sequence: PlannedSequence, answer: SequenceOpened) -> None:
        """The answer says whether the output is in the cache."""
        self._is_missing = not answer.has_extra_rows or self.alignment is not None
        if not self._is_missing:
            self._keep(sequence)

    def chunk(self, sequence: PlannedSequence, num_tokens: int, step: StepInPlanning) -> int:
        """As many as fit beside the output, if the step has to write it."""
        if not self._is_missing or self._reader(sequence) is not None:
            return num_tokens
        return max(0, min(num_tokens, step.room_beside(self.num_extra_rows)))

    def planned(self, sequence: PlannedSequence, step: StepInPlanning) -> None:
        """The step writes the output, or keeps it by keeping another sequence open. A fork has that of its parent."""
        if self._is_missing:
            reader = self._reader(sequence)
            if reader is None:
                step.add_extra_rows(sequence.seq_id, self.num_extra_rows)
            else:
                step.seq_ids.add(reader)
            self._is_missing = False
        if self._kept is None:
            self._keep(sequence)

    def leave(self, last_step_id: int) -> None:
        """The cache keeps nothing because of it any more."""
        self._readers.num_aligned -= self.alignment is not None
        self._is_missing = False
        if self._kept is not None:
            self._readers.remove(*self._kept)
            self._kept = None

    def _reader(self, sequence: PlannedSequence) -> int | None:
        """The seq_id of another sequence that keeps its output in the cache; None: it has to write it."""
        return None if self.alignment is not None else self._readers.any_of(_key(sequence))

    def _keep(self, sequence: PlannedSequence) -> None:
        self._kept = _key(sequence), sequence.seq_id
        self._readers.add(*self._kept)


def _key(sequence: PlannedSequence) -> _Key:
    return sequence.cache_id, sequence.spec.prefix_key
