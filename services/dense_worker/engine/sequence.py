"""`Sequence`: one prompt on its way to tokens, as the scheduler sees it. Plain Python, no torch."""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from services.common.errors import TwostrokeError
from services.common.sampling_params import SamplingParams
from services.step import NewSequence

SUSPECT_CRASHES = 2  # once may be anybody's fault


class SequenceStatus(enum.Enum):
    """Where a sequence stands; only RUNNING ones are known to hold blocks in the KV cache."""

    WAITING = enum.auto()  # in the queue; also after preemption
    OPENING = enum.auto()  # blocks are reserved, the attention worker has been asked
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.Enum):
    """Why a sequence ended. A cancelled one ends without a reason: nobody is told."""

    STOP = enum.auto()
    LENGTH = enum.auto()
    ERROR = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens and how far they have come. Owned by the scheduler, on the engine thread.

    `num_computed_tokens` counts published plans as done. `num_pending_tokens` have been sampled, or will be
    by a published plan, but are not known on the host yet: lengths run ahead of tokens.
    """

    seq_id: int
    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    cache_salt: str = ""
    output_token_ids: list[int] = field(default_factory=list)
    num_logprobs: int | None = None  # report so many likeliest tokens beside each output token; None: nothing
    num_prompt_logprobs: int | None = None  # the same for prompt tokens; None, too, once all have been reported
    priority: int = 0  # lower goes earlier
    arrival_s: float = 0.0  # when it came to this worker, on the monotonic clock
    queue_timeout_s: float | None = None  # longest wait from then to its first step
    traceparent: str = ""  # W3C trace context of its span in this worker; empty without tracing
    num_crashes: int = 0  # of a worker, in a row, that it may have caused; 0 again with its first token here

    status: SequenceStatus = SequenceStatus.WAITING
    order: tuple[float, int] = (0.0, 0)  # set by the scheduler; smaller goes first, kept through preemption
    num_cached_tokens: int | None = None  # found in the KV cache at first opening
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_draft_tokens: int = 0  # of a published plan; until its result is here, lengths are not known
    num_blocks: int = 0  # held in the attention worker once all published plans have run
    num_reserved_blocks: int = 0  # promised to it, not allocated yet
    # On the monotonic clock. A sequence that was submitted again with tokens never has its first step here.
    started_s: float | None = None  # when its first step began
    first_token_s: float | None = None  # when the first token was here that this worker computed

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what kills the workers: then it runs alone until it has a token."""
        return self.num_crashes >= SUSPECT_CRASHES

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def has_started(self) -> bool:
        """Whether it has been opened once, here or, as its tokens tell, in an earlier dense worker."""
        return self.num_cached_tokens is not None or bool(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, pending ones included."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 when no further one is wanted."""
        if len(self.output_token_ids) + self.num_pending_tokens >= self.max_tokens:
            return 0
        return self.num_tokens - self.num_computed_tokens

    def append(self, token_ids: SequenceOf[int]) -> FinishReason | None:
        """Appends sampled tokens up to the one that ends it, if there is such a one: then returns why."""
        for token_id in token_ids:
            self.output_token_ids.append(token_id)
            if token_id in self.stop_token_ids:
                return FinishReason.STOP
            if len(self.output_token_ids) == self.max_tokens:
                return FinishReason.LENGTH
        return None

    def leave_cache(self) -> None:
        """Nothing of it is in the KV cache any more, nor promised to it."""
        self.num_computed_tokens = self.num_draft_tokens = self.num_blocks = self.num_reserved_blocks = 0

    def describe(self) -> NewSequence:
        """What the workers need to know of it, with the tokens it has now."""
        return NewSequence(
            seq_id=self.seq_id,
            request_id=self.request_id,
            token_ids=(*self.prompt_token_ids, *self.output_token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.sampling,
            stop_token_ids=tuple(sorted(self.stop_token_ids)),
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.num_prompt_logprobs,
            cache_salt=self.cache_salt,
            traceparent=self.traceparent,
        )

    @property
    def max_num_cached_tokens(self) -> int:
        """Most tokens it can ever have in the KV cache: the last token sampled is never computed."""
        return self.num_prompt_tokens + self.max_tokens - 1


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a sequence got: tokens, an end, or both."""

    sequence: Sequence
    token_ids: SequenceOf[int]
    finish_reason: FinishReason | None
    error: TwostrokeError | None = None
