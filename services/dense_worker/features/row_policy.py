"""`RowPolicy`: the rows of a sequence that is more than one row of a step.

A plain sequence has none: it is one sequence of the KV cache, with one row in each step that samples, and its next
token is the sampled one. A sequence with a policy is still opened, preempted and closed as a whole, and its prompt is
computed like any other. From then on its policy says which sequences of the KV cache it consists of, from which of them
others are forked, and which tokens are forced on them. A step of it is planned when the result of the last one is here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.engine.block_ledger import BlockLedger, SequenceCounts
from services.dense_worker.engine.limits import SchedulerLimits
from services.pb import dense_pb2
from services.step import PlanEntry


class PlannedRow(NamedTuple):
    """A row of the step that is being planned."""

    entry: PlanEntry
    num_blocks: int  # blocks taken for its tokens
    parent_seq_id: int | None  # the sequence to fork for it before the step; None: its own goes on
    forced_token_ids: tuple[int, ...]  # added to it before the step


class OutputReport(Protocol):
    """What an output says besides tokens and an end."""

    def add_to(self, message: dense_pb2.StepOutput) -> None:
        """Adds it to the message of a step, which has all else of the output. Called on the event loop."""


class RowsAdvanced(NamedTuple):
    """What a result has made of the rows of a sequence."""

    output_token_ids: SequenceOf[int]  # all output tokens of the sequence so far
    dead_seq_ids: SequenceOf[int]  # that nothing continues: the next plan closes them
    is_done: bool  # the sequence has ended
    report: OutputReport


class RowPolicy(Protocol):
    """The rows of one sequence. Engine thread; it keeps nothing of the KV cache beyond `leave_cache`."""

    num_rows: int  # in a step that samples: places that the sequence takes
    num_logprobs: int  # most likely tokens of each row that `advance` needs
    seq_ids: range  # all ids that its rows may have in the KV cache; the first one is that of the sequence
    open_seq_ids: Collection[int]  # those of rows that the KV cache has while the sequence runs
    shared_token_ids: list[int]  # output tokens with which all rows begin: they are computed with the prompt

    def check(self, ledger: BlockLedger, limits: SchedulerLimits) -> None:
        """Raises `InvalidRequest` if the sequence can never run, or would take too much from others."""

    def blocks_to_promise(self, ledger: BlockLedger, num_tokens: int) -> int:
        """The blocks with which the sequence can surely get to `num_tokens` tokens in each row."""

    def has_forked(self, counts: SequenceCounts) -> bool:
        """Whether its next step is one of all its rows; before that, it is one of the sequence alone."""

    def num_to_compute(self, counts: SequenceCounts) -> int:
        """How many tokens its next steps may compute, those of all rows, until it can sample again."""

    def plan(self, counts: SequenceCounts, ledger: BlockLedger, num_tokens: int) -> list[PlannedRow] | None:
        """Takes blocks for the next step and returns its rows, all with as many tokens. None: there are too few blocks.

        num_tokens: how many of all rows together are wanted
        """

    def advance(self, logprobs: Mapping[int, SequenceOf[TokenLogprobs]]) -> RowsAdvanced:
        """Chooses what each row goes on with. logprobs: by seq_id of a row, those of its next token"""

    def leave_cache(self) -> None:
        """The KV cache has no row any more. The prompt comes first again, with `shared_token_ids`."""
