"""`BeamPolicy`: the beams of a sequence as rows. For the scheduler all beams are one `Sequence`.

After the prompt each beam is a sequence of the KV cache: beam i of a sequence has the id seq_id + i. Beams share all
blocks but those in which they differ. Nobody here knows how far that is, nor which blocks behind a window they drop.
They are counted as if they shared only the prompt, which is never too little: output that beams share stays shared, so
from one token to the next they need at most one block each, besides those that they already have.

Gateways get `SearchReport` and `AnswersReport`, in the messages of `protos/dense.proto`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from services.common.errors import InvalidRequest
from services.common.token_logprobs import TokenLogprobs, encode_logprobs, encode_rows
from services.dense_worker.engine.block_ledger import BlockLedger, SequenceCounts
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.features.beams.search import BeamSearch, Hypothesis, SearchState, SearchStep
from services.dense_worker.features.row_policy import PlannedRow, RowsAdvanced
from services.pb import dense_pb2
from services.step import PlanEntry, SequenceSpec


class _NextRow(NamedTuple):
    """The part of a beam in the next step: the last token that was chosen for it, or after a restart several."""

    seq_id: int
    parent_seq_id: int | None  # the beam to fork; None: this one goes on
    token_ids: tuple[int, ...]  # that the KV cache's sequence does not have yet; the step computes the first ones


class BeamPolicy:
    """The search of one sequence, and the ids of its beams. Implements `RowPolicy`.

    Between `advance` and `plan` the new beams exist only here.

    A search that has left the KV cache goes on from its beams: the prompt is computed with the tokens that all of them
    begin with, then the others are forked, and all compute the rest of their tokens together, as many in each step.
    """

    def __init__(self, seq_id: int, spec: SequenceSpec, state: SearchState | None = None) -> None:
        """`spec`: of a beam search. `state`: what the search has found; None: it begins."""
        options, num_logprobs = spec.beam_search, spec.num_logprobs or 0
        assert options is not None, "only a beam search has beams"
        self._spec = spec
        self._search = BeamSearch(
            options, spec.max_tokens, frozenset(spec.stop_token_ids), spec.sampling.min_tokens, num_logprobs, state
        )
        self.num_rows = options.num_beams
        self.num_logprobs = max(self._search.num_candidates, num_logprobs)
        self.seq_ids = range(seq_id, seq_id + options.num_beams)
        self.leave_cache()

    @property
    def best_token_ids(self) -> list[int]:
        """The output tokens of the best beam; all beams have as many."""
        return self._search.beams[0].token_ids

    def check(self, ledger: BlockLedger, limits: SchedulerLimits) -> None:
        """Raises `InvalidRequest` for a search with too many beams, or one that may need too many blocks.

        It may have half of the cache, or as much as a single sequence of `max_model_len` tokens: it holds its blocks
        until its end.
        """
        if self.num_rows > limits.max_num_seqs:
            raise InvalidRequest(f"there are {self.num_rows} beams, max_num_seqs is {limits.max_num_seqs}", "n")
        num_prompt_tokens, max_tokens = self._spec.num_prompt_tokens, self._spec.max_tokens
        num_blocks = self.blocks_to_promise(ledger, num_prompt_tokens + max_tokens - 1)
        most = max(ledger.num_blocks // 2, min(ledger.num_blocks, ledger.blocks_for(limits.max_model_len)))
        if num_blocks > most:
            raise InvalidRequest(
                f"{self.num_rows} beams with a prompt of {num_prompt_tokens} tokens and max_tokens {max_tokens} may "
                f"need {num_blocks} KV cache blocks, a search may have {most} of {ledger.num_blocks}",
                "max_tokens",
            )

    def blocks_to_promise(self, ledger: BlockLedger, num_tokens: int) -> int:
        """The blocks with which the search can get to `num_tokens` tokens.

        Beams are forked before the blocks of those that they replace are known to be free, which takes one block for
        each.
        """
        num_forks = self.num_rows if num_tokens > self._spec.num_prompt_tokens else 0
        return self._most_blocks(ledger, num_tokens) + num_forks

    def has_forked(self, counts: SequenceCounts) -> bool:
        """Whether the next step computes tokens of each beam."""
        return bool(self._rows) and counts.num_computed_tokens >= self._num_tokens_before_fork

    def num_to_compute(self, counts: SequenceCounts) -> int:
        """How many tokens the next steps may compute: those of all beams."""
        if self.has_forked(counts):
            return self.num_rows * self._num_remaining_tokens(counts)
        return self._num_tokens_before_fork - counts.num_computed_tokens

    def plan(self, counts: SequenceCounts, ledger: BlockLedger, num_tokens: int) -> list[PlannedRow] | None:
        """As many tokens of every beam, at least one: all beams are in the same step.

        A new block begins for all beams at once. Within a block, each beam that is forked needs a copy of it.
        """
        num_each, position = max(1, num_tokens // self.num_rows), counts.num_computed_tokens
        num_after, num_full = ledger.blocks_for(position + num_each), position // ledger.block_size
        num_present = ledger.blocks_for(position)
        num_taken = [num_after - (num_present if row.parent_seq_id is None else num_full) for row in self._rows]
        if not ledger.take_for(counts, sum(num_taken)):
            return None
        counts.num_blocks = self._most_blocks(ledger, position + num_each)
        num_logits = int(num_each == self._num_remaining_tokens(counts))
        rows = [
            PlannedRow(PlanEntry(seq_id, position, num_each, num_logits), num_blocks, parent_seq_id, token_ids)
            for (seq_id, parent_seq_id, token_ids), num_blocks in zip(self._rows, num_taken, strict=True)
        ]
        self.open_seq_ids.update(self._seq_ids)
        self._rows = [_NextRow(seq_id, None, ()) for seq_id in self._seq_ids]
        return rows

    def advance(self, logprobs: Mapping[int, SequenceOf[TokenLogprobs]]) -> RowsAdvanced:
        """Chooses the next beams."""
        has_logprobs, search = self._spec.num_logprobs is not None, self._search
        step = search.advance([logprobs[seq_id][0] for seq_id in self._seq_ids])
        if search.is_done:
            return RowsAdvanced(self.best_token_ids, (), True, AnswersReport(search.hypotheses, has_logprobs))
        parents = [self._seq_ids[index] for index in step.parents]
        continued = set(parents)
        dead = [seq_id for seq_id in self._seq_ids if seq_id not in continued]
        self.open_seq_ids.difference_update(dead)
        unused = [seq_id for seq_id in self.seq_ids if seq_id not in continued]
        self._rows = []
        for parent, beam in zip(parents, search.beams, strict=True):
            if parent in continued:  # the first beam that continues it takes its place
                continued.remove(parent)
                row = _NextRow(parent, None, (beam.token_ids[-1],))
            else:
                row = _NextRow(unused.pop(0), parent, (beam.token_ids[-1],))
            self._rows.append(row)
        self._seq_ids = [row.seq_id for row in self._rows]
        return RowsAdvanced(self.best_token_ids, dead, False, SearchReport(self.seq_ids[0], step, has_logprobs))

    def leave_cache(self) -> None:
        """The KV cache has no beam any more. The prompt comes first again, with `shared_token_ids`."""
        beams, first, num_tokens = self._search.beams, self.seq_ids[0], len(self.best_token_ids)
        self._seq_ids = list(self.seq_ids[: len(beams)])  # aligned with the search's beams
        self.open_seq_ids = {first}  # of beams in the KV cache
        num_shared = max(0, min(_num_common([beam.token_ids for beam in beams]), num_tokens - 1))
        self.shared_token_ids = self.best_token_ids[:num_shared]
        self._rows: list[_NextRow] = []  # of the next step after the prompt; none before the first token
        if num_tokens:
            self._rows = [
                _NextRow(seq_id, None if seq_id == first else first, tuple(beam.token_ids[num_shared:]))
                for seq_id, beam in zip(self._seq_ids, beams, strict=True)
            ]

    @property
    def _num_tokens_before_fork(self) -> int:
        """First tokens, which are computed once."""
        return self._spec.num_prompt_tokens + len(self.shared_token_ids)

    def _num_remaining_tokens(self, counts: SequenceCounts) -> int:
        """Tokens of each beam to compute before the next ones can be chosen."""
        return self._spec.num_prompt_tokens + len(self.best_token_ids) - counts.num_computed_tokens

    def _most_blocks(self, ledger: BlockLedger, num_tokens: int) -> int:
        """The most blocks that hold `num_tokens` tokens of each beam; of the prompt, if they are no more."""
        num_blocks = ledger.blocks_for(num_tokens)
        if num_tokens <= self._spec.num_prompt_tokens:
            return num_blocks
        num_shared = self._spec.num_prompt_tokens // ledger.block_size
        return num_shared + self.num_rows * (num_blocks - num_shared)


def _num_common(token_ids: SequenceOf[list[int]]) -> int:
    """How many first tokens all have in common."""
    columns = enumerate(zip(*token_ids, strict=True))
    return next((index for index, column in columns if len(set(column)) > 1), len(token_ids[0]))


@dataclass(frozen=True, slots=True)
class SearchReport:
    """The last step of a search that goes on. Implements `OutputReport`."""

    seq_id: int
    step: SearchStep
    has_logprobs: bool  # of tokens that are reported

    def add_to(self, message: dense_pb2.StepOutput) -> None:
        """Adds the step to the searches of the message."""
        message.searches.append(self.encode())

    def encode(self) -> dense_pb2.BeamStep:
        """The message of the step."""
        step, has_logprobs = self.step, self.has_logprobs
        return dense_pb2.BeamStep(
            seq_id=self.seq_id,
            parents=step.parents,
            token_ids=[beam.token_ids[-1] for beam in step.beams],
            scores=[beam.score for beam in step.beams],
            logprobs=[encode_logprobs(beam.logprobs[-1]) for beam in step.beams] if has_logprobs else (),
            ended=[
                dense_pb2.EndedBeam(
                    parent=parent,
                    token_id=answer.token_ids[-1],
                    score=answer.score,
                    logprobs=encode_logprobs(answer.logprobs[-1]) if has_logprobs else None,
                )
                for parent, answer in step.ended
            ],
        )


@dataclass(frozen=True, slots=True)
class AnswersReport:
    """The answers of a search that has ended. Implements `OutputReport`."""

    hypotheses: SequenceOf[Hypothesis]  # the best one first
    has_logprobs: bool

    def add_to(self, message: dense_pb2.StepOutput) -> None:
        """Adds the answers to the last end of the message."""
        made: dict[int, bytes] = {}  # the answers have most of their beginnings in common
        message.ended[-1].answers.extend(
            dense_pb2.BeamAnswer(
                token_ids=answer.token_ids,
                logprob_rows=encode_rows(answer.logprobs, made) if self.has_logprobs else b"",
                score=answer.score,
                reason=dense_pb2.SequenceEnd.STOP if answer.is_stopped else dense_pb2.SequenceEnd.LENGTH,
            )
            for answer in self.hypotheses
        )
