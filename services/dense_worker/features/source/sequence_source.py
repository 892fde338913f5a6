"""`SequenceSource`: what one sequence reads of its encoder."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from services.dense_worker.encoders.encoder_runs import EncodedSequence, EncoderRuns
from services.dense_worker.features.sequence_feature import PlannedSequence, StepInPlanning

if TYPE_CHECKING:
    from services.dense_worker.encoders.encoder import Encoded
    from services.dense_worker.encoders.source.runnable_encoder import SourceInput
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


class SequenceSource(EncodedSequence["SourceInput"]):
    """Holds what the encoder reads, on the host, until the sequence ends: it may have to be read again.

    The first step of a sequence writes the encoder's output to the KV cache, unless it is there because of another
    sequence. A sequence that had it in the cache before is opened without it, and waits for the encoder only if it is
    gone. One with an alignment needs the output in any case: its first step makes keys of it that stay here.
    """

    def __init__(
        self,
        source: SourceInput,
        runs: EncoderRuns[SourceInput],
        readers: Readers,
        alignment: Alignment | None = None,
        *,
        has_run: bool = False,
    ) -> None:
        """readers: those of the worker; alignment: None: it is not asked for; has_run: in another dense worker"""
        super().__init__((source,), runs)
        self.alignment = alignment
        self.reports = self.reports_prompt = self.ignores_prefix_cache = alignment is not None
        self.has_output = alignment is None
        self.num_extra_rows = source.num_rows
        self.output: Encoded | None = None  # for the step that has been planned with it, and not prepared yet
        self._needed = self.resource
        self._readers = readers
        self._is_missing = False  # the output is not in the cache, and no plan writes it for this sequence
        self._kept: tuple[_Key, int] | None = None  # what is kept in the cache because of which seq_id
        if has_run:
            self._hope_for_cache()

    @property
    def joins_prompts(self) -> bool:
        """Whether its first step may run the encoder."""
        return self._is_missing

    @property
    def allows_drafts(self) -> bool:
        """Not in the step that runs the encoder."""
        return not self._is_missing

    @property
    def is_ready(self) -> bool:
        """Whether the output is in memory, or may be in the cache."""
        return self.resource is None or super().is_ready

    def enter(self) -> None:
        """Keeps the output in memory, if it has to be there."""
        self._readers.num_aligned += self.alignment is not None
        self.output = None
        if self.resource is not None:
            super().enter()

    def at_opening(self) -> SequenceSource:
        """This object, which gives the output to the step that is planned with it."""
        return self

    def opened(self, sequence: PlannedSequence, answer: SequenceOpened) -> bool:
        """The answer says whether the output is in the cache."""
        self._is_missing = not answer.has_extra_rows
        if self._is_missing and self.pin is None:
            self.resource = self._needed
            return False
        if not self._is_missing:
            self._keep(sequence)
            if self.alignment is None:
                self._release()
        return True

    def chunk(self, sequence: PlannedSequence, num_tokens: int, step: StepInPlanning) -> int:
        """As many as fit beside the output, if the step has to write it."""
        if not self._is_missing or self._reader(sequence) is not None:
            return num_tokens
        return max(0, min(num_tokens, step.room_beside(self.num_extra_rows)))

    def planned(self, sequence: PlannedSequence, step: StepInPlanning) -> None:
        """The step writes the output, or keeps it by keeping another sequence open. A fork has that of its parent."""
        needs_output = self.alignment is not None
        if self._is_missing:
            reader = self._reader(sequence)
            if reader is None:
                step.add_extra_rows(sequence.seq_id, self.num_extra_rows)
                needs_output = True
            else:
                step.seq_ids.add(reader)
            self._is_missing = False
        if self._kept is None:
            self._keep(sequence)
        if self.pin is not None:
            if needs_output:
                self.output = self.pin.outputs[self.inputs[0].hash]
            self._release()

    def leave(self, last_step_id: int) -> None:
        """The cache keeps nothing because of it any more, but may have it when the sequence enters again."""
        self._readers.num_aligned -= self.alignment is not None
        self._is_missing = False
        self._release()
        if self._kept is not None:
            self._readers.remove(*self._kept)
            self._kept = None
            self._hope_for_cache()

    def caches_are_new(self) -> None:
        """The encoder has to run before it is opened, which would otherwise say so and be done again."""
        self.resource = self._needed

    def _hope_for_cache(self) -> None:
        if self.alignment is None:
            self.resource = None

    def _release(self) -> None:
        """No step needs the output any more, or one that has it."""
        if self.pin is not None:
            self.pin.release()
            self.pin = None

    def _reader(self, sequence: PlannedSequence) -> int | None:
        """The seq_id of another sequence that keeps its output in the cache; None: it has to write it."""
        return self._readers.any_of(_key(sequence))

    def _keep(self, sequence: PlannedSequence) -> None:
        self._kept = _key(sequence), sequence.seq_id
        self._readers.add(*self._kept)


def _key(sequence: PlannedSequence) -> _Key:
    return sequence.cache_id, sequence.spec.prefix_key
