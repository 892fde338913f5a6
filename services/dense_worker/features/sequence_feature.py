"""`SequenceFeature`: what one sequence has of a feature. The scheduler's sequence and the runner's state hold it.

`PromptReport` is that of a feature that reports something of each token of the prompt.
"""

from __future__ import annotations

from collections.abc import Awaitable, Hashable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol

from services.step import SequenceOpened, SequenceSpec

if TYPE_CHECKING:
    from services.dense_worker.features.report import TokenReport
    from services.pb import dense_pb2

ResourceKey = Hashable


class PlannedSequence(Protocol):
    """What a feature reads of the scheduler's sequence."""

    @property
    def spec(self) -> SequenceSpec: ...

    @property
    def seq_id(self) -> int: ...

    @property
    def cache_id(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...


class StepInPlanning(Protocol):
    """What a feature reads of a step that is being planned, and adds to it: `PlanBuilder` has the docstrings."""

    num_tokens: int
    seq_ids: set[int]

    def room_beside(self, num_extra_rows: int) -> int: ...

    def add_extra_rows(self, seq_id: int, num_rows: int) -> None: ...


class SequenceFeature:
    """Made by `Feature.admit`, and used on the engine thread from then on. A feature overrides what it needs.

    A sequence that is preempted, or whose attention worker has died, waits, enters and is restored again, with the
    same object. A sequence that comes to another dense worker gets a new one there.
    """

    # What it must have in memory before it can be opened, and shares with the other sequences that need the same.
    resource: ResourceKey | None = None
    # Each step may report more of it than a token, so that the scheduler plans and reports it by itself.
    reports: bool = False
    # Something is yet to be reported of its prompt, which it therefore computes itself.
    reports_prompt: bool = False
    # How many values steps report of each token of its prompt. One step reports a limited number.
    num_values_per_token: int = 0
    # Whether anybody reads its output. A step of sequences without output computes no logits: the token that ends each
    # of them is 0.
    has_output: bool = True
    # All its tokens are computed, also those that are in the prefix cache.
    ignores_prefix_cache: bool = False
    # Whether draft tokens of it can be verified.
    allows_drafts: bool = True
    # Whether it knows some next tokens for certain: `forced_token_ids`. Then these are its only draft tokens, which it
    # also has in a server without speculation. The scheduler plans it by itself where these may pay, and while it takes
    # turns because of its `host_s`.
    forces_tokens: bool = False

    # Rows that the KV cache keeps for it besides those of its tokens.
    num_extra_rows: int = 0
    # Whether its next step does more than compute its tokens. Then it is planned with prompts, not with streams.
    joins_prompts: bool = False

    @property
    def host_s(self) -> float:
        """What a step with a token of it takes of the host's time, by the last one. Those that take long take turns."""
        return 0.0

    def prepare(self) -> Awaitable[None] | None:
        """What has to end before it joins the queue, without blocking the event loop; None: nothing.

        The sequence ends with a `TwostrokeError` that it raises.
        """
        return None

    @property
    def is_ready(self) -> bool:
        """Whether its `resource` is in memory. Until then the sequence waits, and others go on."""
        return True

    def enter(self) -> None:
        """The sequence is being opened: from now on its resource has to stay in memory."""

    def caches_are_new(self) -> None:
        """No KV cache has anything of it: all attention workers have begun anew since any step ran it."""

    def leave(self, last_step_id: int) -> None:
        """The sequence leaves the KV cache. Steps up to `last_step_id` have been planned, and may still run it.

        Called once after each `enter`.
        """

    def at_opening(self) -> SequenceFeature:
        """What the runner holds until the sequence is closed: this object, or its state of now."""
        return self

    def restore(self, output_token_ids: SequenceOf[int]) -> None:
        """The runner has opened the sequence, which has this output already."""

    def fork(self) -> SequenceFeature:
        """What a fork of the sequence in the runner has."""
        return self

    def note_reported(self, report: TokenReport) -> None:
        """A report of the sequence, of this feature or another, goes to its client."""

    def opened(self, sequence: PlannedSequence, answer: SequenceOpened) -> bool:
        """The sequence is in the KV cache. Returns whether steps may run it: else it is closed, and waits for its
        `resource`, which it has only from now on.
        """
        return True

    def chunk(self, sequence: PlannedSequence, num_tokens: int, step: StepInPlanning) -> int:
        """How many of its next tokens a step computes, if it could compute `num_tokens`, and all that are left of its
        budget if need be; 0: none in this step.
        """
        return num_tokens

    def planned(self, sequence: PlannedSequence, step: StepInPlanning) -> None:
        """The step has an entry of the sequence: adds what the plan says of the feature. Not called for decode rows,
        nor for rows of a policy.
        """

    @property
    def forced_token_ids(self) -> SequenceOf[int]:
        """The next tokens, as far as there is no choice. A further token follows them."""
        return ()

    def vocabulary_tokens(self, token_ids: SequenceOf[int]) -> SequenceOf[int]:
        """Those of its prompt's tokens that are of the vocabulary."""
        return token_ids


class PromptReport(SequenceFeature):
    """Ends with the prompt: then the sequence is like any other."""

    name: str  # of the feature

    def __init__(self, spec: SequenceSpec, submit: dense_pb2.Submit) -> None:
        """submit: the message that the spec is from, which says what has arrived before a worker died"""
        self.spec = spec
        self.is_over = submit.num_reported.get(self.name, 0) >= spec.num_prompt_tokens

    @property
    def reports(self) -> bool:
        return not self.is_over

    @property
    def reports_prompt(self) -> bool:
        return not self.is_over

    def note_reported(self, report: TokenReport) -> None:
        if report.feature == self.name and report.end == self.spec.num_prompt_tokens:
            self.is_over = True
