"""`Sequence`: one prompt with its output, as the scheduler sees it. Plain Python, no torch."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from services.common.errors import TwostrokeError
from services.dense_worker.engine.block_ledger import DividedLedger, SequenceCounts
from services.dense_worker.engine.fairness.flows import Flow
from services.dense_worker.features.sequence_feature import ResourceKey, SequenceFeature
from services.dense_worker.runner.batch_rows import RequestState
from services.step import NewSequence, SequenceSpec

if TYPE_CHECKING:  # they need torch and protobuf
    from services.dense_worker.features.row_policy import OutputReport, RowPolicy

SUSPECT_CRASHES = 2  # any running sequence may have caused a single crash
AFTER_SUSPECT_S = 0.1  # in which what is reported of a suspect leaves the process, also on a busy machine


class SequenceStatus(enum.Enum):
    """The state of a sequence. Only RUNNING sequences are known to hold blocks in the KV cache."""

    WAITING = enum.auto()  # in the queue; also after preemption
    OPENING = enum.auto()  # blocks are reserved, and the attention worker is opening it
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.Enum):
    """Why a sequence ended. A cancelled sequence has no reason, since nothing is reported."""

    STOP = enum.auto()
    LENGTH = enum.auto()
    ERROR = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of a request and how many are computed. Owned by the scheduler, on the engine thread.

    `num_computed_tokens` counts published plans as done. `num_pending_tokens` have been sampled, or will be
    by a published plan, but are not known on the host yet: lengths run ahead of tokens.
    """

    seq_id: int
    spec: SequenceSpec
    output_token_ids: list[int] = field(default_factory=list)
    features: SequenceOf[SequenceFeature] = ()  # what it has that only some sequences have; mostly nothing
    # Names all sequences with equal prompts and prefix keys: they may be forked from each other. 0: only it.
    group_id: int = 0
    stream: int = 0  # number of the gateway's stream by which it came
    arrival_s: float = 0.0  # arrival at this worker, on the monotonic clock
    queue_timeout_s: float | None = None  # longest time from arrival to the first step
    traceparent: str = ""  # W3C trace context of its span in this worker; empty without tracing
    num_crashes: int = 0  # consecutive worker crashes that it may have caused; reset by its first token here
    policy: RowPolicy | None = None  # None: it is one row, whose tokens are sampled

    status: SequenceStatus = SequenceStatus.WAITING
    order: tuple[float, int] = (0.0, 0)  # set by the scheduler; smaller goes first; only the end of a turn changes it
    flow: Flow | None = None  # its client's, while it is live; set by the waiting queue
    num_paid_outputs: int = 0  # output tokens that its flow has been charged for; 0 while it waits
    num_cached_tokens: int | None = None  # tokens found in the KV cache when it was opened, see `note_found`
    counts: SequenceCounts = field(default_factory=SequenceCounts)  # or those of its row of `DecodeRows`
    cache_id: int = 0  # the KV cache, of several attention workers', in which it is or was, or will be opened
    divided: DividedLedger | None = None  # its blocks, if several KV caches have some, from its opening on
    leaves_cache_id: int | None = None  # the one that it has left, which may have its blocks to copy, until it runs
    lane: int = 0  # in which it runs, or ran last
    num_draft_tokens: int = 0  # drafts of a published plan; lengths are unknown until its result arrives
    num_evicted_blocks: int = 0  # its first blocks, which it has dropped, because no further token reads them
    num_opened_tokens: int = 0  # that were in the cache when it was opened
    # On the monotonic clock. A sequence that was submitted again with tokens has no first step here.
    started_s: float | None = None  # when its first step began
    first_token_s: float | None = None  # when the first token computed by this worker was known

    @property
    def slot(self) -> int | None:
        """Its slot of `DecodeRows`, which has its counts while it has one."""
        return self.counts.slot

    @property
    def num_computed_tokens(self) -> int:
        return self.counts.num_computed_tokens

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        self.counts.num_computed_tokens = value

    @property
    def num_pending_tokens(self) -> int:
        return self.counts.num_pending_tokens

    @num_pending_tokens.setter
    def num_pending_tokens(self, value: int) -> None:
        self.counts.num_pending_tokens = value

    @property
    def num_blocks(self) -> int:
        return self.counts.num_blocks

    @num_blocks.setter
    def num_blocks(self, value: int) -> None:
        self.counts.num_blocks = value

    @property
    def num_reserved_blocks(self) -> int:
        return self.counts.num_reserved_blocks

    @num_reserved_blocks.setter
    def num_reserved_blocks(self, value: int) -> None:
        self.counts.num_reserved_blocks = value

    @property
    def cache_ids(self) -> Collection[int]:
        """The KV caches in which it is or was, or will be opened."""
        return (self.cache_id,) if self.divided is None else self.divided.cache_ids

    def num_blocks_in(self, cache_id: int) -> int:
        """Blocks of one of these that it has or that are promised to it."""
        if self.divided is not None:
            return self.divided.num_blocks_in(cache_id)
        return self.num_blocks + self.num_reserved_blocks

    @property
    def is_suspect(self) -> bool:
        """Whether it may be the cause of the crashes; then it runs alone until it gets a token."""
        return self.num_crashes >= SUSPECT_CRASHES

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt_token_ids)

    @property
    def resources(self) -> list[ResourceKey]:
        """What it shares with other sequences, and has to be in memory before it is opened."""
        return [each.resource for each in self.features if each.resource is not None]

    @property
    def is_ready(self) -> bool:
        """Whether all its resources are in memory."""
        return all([each.is_ready for each in self.features])

    @property
    def forced_by(self) -> SequenceFeature | None:
        """What knows some of its next tokens for certain; None: nothing does."""
        return next((each for each in self.features if each.forces_tokens), None)

    @property
    def num_values_per_token(self) -> int:
        """How many values steps report of each token of its prompt."""
        return sum([each.num_values_per_token for each in self.features])

    @property
    def joins_prompts(self) -> bool:
        """Whether its next step does more than compute its tokens."""
        return any([each.joins_prompts for each in self.features])

    @property
    def num_rows(self) -> int:
        """Rows that it has in a step that samples tokens."""
        return 1 if self.policy is None else self.policy.num_rows

    @property
    def open_seq_ids(self) -> Iterable[int]:
        """Its ids in the KV cache while it runs."""
        return (self.seq_id,) if self.policy is None else self.policy.open_seq_ids

    @property
    def has_started(self) -> bool:
        """Whether it has been opened before: here, or (if it has output tokens) in an earlier dense worker."""
        return self.num_cached_tokens is not None or bool(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, pending ones included."""
        return len(self.spec.prompt_token_ids) + len(self.output_token_ids) + self.counts.num_pending_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 if no further token is needed."""
        num_output_tokens = len(self.output_token_ids) + self.counts.num_pending_tokens
        if num_output_tokens >= self.spec.max_tokens:
            return 0
        return len(self.spec.prompt_token_ids) + num_output_tokens - self.counts.num_computed_tokens

    def get_flow(self) -> Flow:
        """The flow of a sequence that has been admitted."""
        assert self.flow is not None, "the sequence has not been admitted"
        return self.flow

    @property
    def is_plain(self) -> bool:
        """Whether a step that decodes it gets one token from it, and has nothing else to report or to do for it."""
        reports = self.spec.num_logprobs is not None or any([each.reports for each in self.features])
        return self.policy is None and not reports

    def append(self, token_ids: SequenceOf[int], is_complete: bool = False) -> FinishReason | None:
        """Appends sampled tokens up to the one that ends it, if there is such a one: then returns why.

        `is_complete`: nothing can follow the last one.
        """
        for token_id in token_ids:
            self.output_token_ids.append(token_id)
            if token_id in self.spec.stop_token_ids:
                return FinishReason.STOP
            if len(self.output_token_ids) == self.spec.max_tokens:
                return FinishReason.STOP if is_complete else FinishReason.LENGTH
        return FinishReason.STOP if is_complete else None

    def note_found(self, num_tokens: int) -> None:
        """It has been opened, and so many of its tokens were in the KV cache.

        Before its first token a later opening counts if fewer were: what an earlier one had found has been lost. (More
        may be what it has computed itself.) Its first step then comes again.
        """
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_tokens
        elif num_tokens < self.num_cached_tokens and not self.output_token_ids:
            self.num_cached_tokens, self.started_s = num_tokens, None

    def leave_cache(self) -> None:
        """Resets all counts of the KV cache: it holds no blocks and no reservation any more."""
        self.counts = SequenceCounts(num_pending_tokens=self.num_pending_tokens)
        self.num_draft_tokens = self.num_evicted_blocks = self.num_opened_tokens = 0
        self.leaves_cache_id = self.divided = None

    def describe_to_caches(self, prefix_generation: int = 0) -> list[NewSequence]:
        """The sequence with its present tokens, for each KV cache that has some of it."""
        new = self.describe(prefix_generation)
        return [new] if self.divided is None else self.divided.split(new)

    def describe(self, prefix_generation: int = 0, *, starts_empty: bool = False) -> NewSequence:
        """The sequence with its present tokens, for the KV cache; with those that all its rows share."""
        return NewSequence(
            seq_id=self.seq_id,
            request_id=self.spec.request_id,
            token_ids=tuple(self._token_ids_before_fork()),
            num_prompt_tokens=self.num_prompt_tokens,
            prefix_key=self.spec.prefix_key,
            prefix_generation=prefix_generation,
            ignores_prefix_cache=any([each.ignores_prefix_cache for each in self.features]),
            traceparent=self.traceparent,
            cache_id=self.cache_id,
            leaves_cache_id=None if self.leaves_cache_id == self.cache_id else self.leaves_cache_id,
            num_extra_rows=sum([each.num_extra_rows for each in self.features]),
            spans=self.spec.spans,
            starts_empty=starts_empty,
        )

    def describe_to_runner(self) -> RequestState:
        """The sequence with the same tokens, for the runner."""
        return RequestState(
            self.seq_id,
            self.spec,
            self._token_ids_before_fork(),
            num_logprobs=self.spec.num_logprobs if self.policy is None else self.policy.num_logprobs,
            has_forced_tokens=self.policy is not None,
            features=tuple([each.at_opening() for each in self.features]),
            lane=self.lane,
        )

    def _token_ids_before_fork(self) -> list[int]:
        output_token_ids = self.output_token_ids if self.policy is None else self.policy.shared_token_ids
        return [*self.spec.prompt_token_ids, *output_token_ids]

    @property
    def max_num_cached_tokens(self) -> int:
        """Maximum number of its tokens in the KV cache; the last sampled token is never computed."""
        return len(self.spec.prompt_token_ids) + self.spec.max_tokens - 1


class SequenceOutput(NamedTuple):
    """New tokens of a sequence, its end, or both. With a row policy there are none, but a report.

    Each step makes one for each sequence: a tuple takes a third of the time of a frozen dataclass.
    """

    sequence: Sequence
    token_ids: SequenceOf[int]
    finish_reason: FinishReason | None
    error: TwostrokeError | None = None
    report: OutputReport | None = None  # of its row policy

    @classmethod
    def failed(cls, sequence: Sequence, error: TwostrokeError) -> SequenceOutput:
        """The end of a sequence that cannot go on."""
        return cls(sequence, (), FinishReason.ERROR, error)
