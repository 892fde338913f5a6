"""`Feature`: what only some sequences have, such as an adapter or a grammar. A worker has one object of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from services.dense_worker.features.sequence_feature import SequenceFeature

if TYPE_CHECKING:
    from services.common.errors import TwostrokeError
    from services.dense_worker.encoders.encoder import EncoderCounts
    from services.dense_worker.engine.sequence import Sequence
    from services.dense_worker.engine.waiting_queue import WaitingQueue
    from services.dense_worker.features.step_part import FeatureRows, StepPart, StepView
    from services.dense_worker.ranks.leading_backend import LeadingRanks
    from services.dense_worker.sampling.logits_editor import LogitsEditor
    from services.pb import dense_pb2
    from services.step import SequenceSpec

# What has happened to a feature's resources: called on the engine thread, it returns sequences that end, and why.
Event = Callable[["WaitingQueue"], Iterable["tuple[Sequence, TwostrokeError]"]]


class Feature:
    """Overrides what it needs. `admit`, `receive` and `end_stream` are called on the event loop, the rest on the engine
    thread. Whatever belongs to a single sequence is in its `SequenceFeature`.
    """

    sequence_type: type[SequenceFeature]  # what `admit` makes; no other feature has the same
    editors: SequenceOf[type[LogitsEditor]] = ()  # of logits, after all others
    has_kernels: bool = False  # steps with and without its rows run other kernels: `begin_step`, `activated`
    gives_vectors: bool = False  # many steps have some of it in place of embeddings, so that a GPU captures them
    name: str = ""  # by which a spec asks for it: one of `SequenceSpec.asked_features`
    further_names: SequenceOf[str] = ()  # other keys in `SequenceSpec.features` that it reads
    sees_all: bool = False  # `admit` is also called for sequences that do not ask for it, which it may refuse
    message: str = ""  # the kind of `GatewayMessage` that `receive` takes, if there is one

    def start(self, post: Callable[[Event], None]) -> None:
        """Called once, when the engine exists. `post`, which any thread may call, tells the engine of an event."""

    def attached(self, ranks: LeadingRanks | None) -> None:
        """A new attachment begins; all sequences will be opened again. `ranks`: those that compute its steps, too."""

    def read_ahead(self) -> None:
        """Begins to read what its first sequence needs. It may hold the interpreter lock for tenths of a second."""

    def max_hidden_rows(self, max_num_seqs: int, max_num_tokens: int) -> int:
        """How many hidden states a step within these limits takes of sequences without output; 0: it has none."""
        return 0

    def encoder_counts(self) -> EncoderCounts | None:
        """What its encoder does, for metrics; None: it has no encoder."""
        return None

    def close(self) -> None:
        """Ends its threads."""

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceFeature | None:
        """What a new sequence that asks for it has of it; None: nothing. Raises `InvalidRequest` if it cannot have it.

        submit: the message that the spec is from; stream: the number of the stream by which it came
        """
        raise NotImplementedError

    def receive(self, message: dense_pb2.GatewayMessage, stream: int) -> None:
        """Takes a message of its own kind."""

    def end_stream(self, stream: int) -> None:
        """A gateway's stream has ended."""

    def provide(self, waiting: WaitingQueue, oldest_step_id: int | None) -> Iterable[Sequence]:
        """Begins to load what parked sequences lack. Called before sequences are opened, while any is parked, and once
        when none is any more.

        oldest_step_id: of the steps under way. Returns the sequences that are newly parked.
        """
        return ()

    def prepare_step(self, step: StepView, rows: FeatureRows) -> StepPart | None:
        """What a step does for its rows, of which there is at least one; None: nothing."""
        raise NotImplementedError

    def begin_step(self, part: StepPart | None, num_rows: int) -> None:
        """The layers of a step of `num_rows` rows, padding included, are run or enqueued next. part: its own, if any.

        Called before every step, if it `has_kernels`.
        """

    def activated(self, is_active: bool) -> AbstractContextManager[None]:
        """A context in which a GPU captures steps with its rows, or without; only if it `has_kernels`."""
        raise NotImplementedError
