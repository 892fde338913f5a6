"""`Rehearsal`: does for a sequence that is about to come what will be done for it, on objects that nobody else uses.

What has not run for some milliseconds takes three to five times as long as what has just run, because the processor's
caches are full of other things. A gateway needs more than a millisecond to read a request, in which an idle worker
runs the code between a sequence's arrival and its first plan once. What follows is left out: the request would come
meanwhile, and wait for the interpreter. Engine thread.
"""

from __future__ import annotations

from dataclasses import replace

from services.common.errors import TwostrokeError
from services.dense_worker.engine.attachment import Attachment
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import Sequence
from services.step import SequenceSpec
from services.step.codec import encode_plan

_MAX_PROMPT_TOKENS = 256  # of the sequence, so that it takes no longer than the gateway
_SEQ_ID = 0  # no gateway gives it


class Rehearsal:
    """Of one attachment. It rehearses a plain sequence like the last one."""

    def __init__(self, limits: SchedulerLimits, attachment: Attachment) -> None:
        first = attachment.caches[0]
        self._attachment = replace(
            attachment,
            channels={},
            caches=(replace(first, num_free_blocks=first.num_blocks, orphaned_blocks={}, is_empty=True),),
            link=None,
            ranks=None,
        )
        self._scheduler = Scheduler(limits)
        self._spec: SequenceSpec | None = None  # None: no plain one has come yet
        self._sequence: Sequence | None = None  # that is rehearsed next; None: `prepare` has not been called

    def note(self, sequence: Sequence) -> None:
        """A sequence has come."""
        if sequence.is_plain and not sequence.features and not sequence.spec.spans:
            self._spec = sequence.spec

    def prepare(self) -> None:
        """To be called when nothing else is to be done, before each `run`."""
        if self._sequence is not None or self._spec is None:
            return
        self._scheduler.cancel(_SEQ_ID)
        session = self._scheduler.begin(self._attachment)
        session.num_completed = 1  # as if a step had run: then the plan that opens a sequence runs it
        prompt = self._spec.prompt_token_ids[:_MAX_PROMPT_TOKENS]
        self._sequence = Sequence(_SEQ_ID, replace(self._spec, prompt_token_ids=prompt))

    def run(self) -> None:
        """Admits and plans the sequence, and encodes the plan."""
        sequence, self._sequence = self._sequence, None
        if sequence is None:
            return
        try:
            self._scheduler.add(sequence)
        except TwostrokeError:  # another attachment may have less room than the one that the last prompt fitted into
            return
        self._scheduler.next_to_open()
        if (step := self._scheduler.schedule()) is not None:
            encode_plan(step.plan).SerializeToString()
