"""`BeamGroup`: the beams of a sequence as sequences of the KV cache. Part of the scheduler.

For the scheduler all beams are one `Sequence`: it is opened, preempted and closed as a whole, and counts as many places
and tokens as it has beams. Its prompt is computed once. After that each beam is a sequence of the KV cache: beam i of a
sequence has the id seq_id + i. Beams share all blocks but those in which they differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from services.common.beams.options import BeamSearchOptions
from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.features.beams.search import BeamSearch, Hypothesis, SearchState, SearchStep


class BeamRow(NamedTuple):
    """The part of a beam in the next step: the last token that was chosen for it, or after a restart several."""

    seq_id: int
    parent_seq_id: int | None  # the beam to fork; None: this one goes on
    token_ids: tuple[int, ...]  # that the KV cache's sequence does not have yet; the step computes the first ones


class BeamGroup:
    """The search of one sequence, and the ids of its beams.

    Between `advance` and `note_planned` the new beams exist only here.

    A search that has left the KV cache goes on from its beams: the prompt is computed with the tokens that all of them
    begin with, then the others are forked, and all compute the rest of their tokens together, as many in each step.
    """

    def __init__(
        self,
        seq_id: int,
        options: BeamSearchOptions,
        max_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        num_logprobs: int | None = None,
        state: SearchState | None = None,
    ) -> None:
        """The options are those of the sequence. `state`: what the search has found; None: it begins."""
        self.options = options
        self._seq_id = seq_id
        self._search = BeamSearch(options, max_tokens, stop_token_ids, min_tokens, num_logprobs or 0, state)
        self._num_logprobs = num_logprobs or 0
        self.leave_cache()

    def leave_cache(self) -> None:
        """The KV cache has no beam any more. The prompt comes first again, with `shared_token_ids`."""
        beams = self._search.beams
        self._seq_ids = list(self.seq_ids[: len(beams)])  # aligned with the search's beams
        self.open_seq_ids = {self._seq_id}  # of beams in the KV cache
        num_shared = max(0, min(_num_common([beam.token_ids for beam in beams]), self.num_tokens - 1))
        self.shared_token_ids = beams[0].token_ids[:num_shared]  # output tokens that are computed with the prompt
        self.rows: list[BeamRow] = []  # of the next step after the prompt; none before the first token
        if self.num_tokens:
            self.rows = [
                BeamRow(seq_id, None if seq_id == self._seq_id else self._seq_id, tuple(beam.token_ids[num_shared:]))
                for seq_id, beam in zip(self._seq_ids, beams, strict=True)
            ]

    @property
    def seq_ids(self) -> range:
        """All ids that its beams may have."""
        return range(self._seq_id, self._seq_id + self.options.num_beams)

    @property
    def num_candidates(self) -> int:
        """Number of most likely tokens of each beam that `advance` needs."""
        return max(self._search.num_candidates, self._num_logprobs)

    @property
    def is_done(self) -> bool:
        return self._search.is_done

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The answers, the best one first, when the search is done."""
        return self._search.hypotheses

    @property
    def num_tokens(self) -> int:
        """Output tokens of each beam."""
        return len(self._search.beams[0].token_ids)

    @property
    def best_token_ids(self) -> list[int]:
        """The output tokens of the best beam; all beams have as many."""
        return self._search.beams[0].token_ids

    def advance(self, logprobs: Mapping[int, SequenceOf[TokenLogprobs]]) -> tuple[SearchStep, list[int]]:
        """Chooses the next beams. Returns the step, and the ids of beams in the KV cache that nothing continues.

        logprobs: by id of a beam, those of its next token
        """
        step = self._search.advance([logprobs[seq_id][0] for seq_id in self._seq_ids])
        if self.is_done:
            return step, []
        parents = [self._seq_ids[index] for index in step.parents]
        continued = set(parents)
        dead = [seq_id for seq_id in self._seq_ids if seq_id not in continued]
        self.open_seq_ids.difference_update(dead)
        unused = [seq_id for seq_id in self.seq_ids if seq_id not in continued]
        self.rows.clear()
        for parent, beam in zip(parents, self._search.beams, strict=True):
            if parent in continued:  # the first beam that continues it takes its place
                continued.remove(parent)
                row = BeamRow(parent, None, (beam.token_ids[-1],))
            else:
                row = BeamRow(unused.pop(0), parent, (beam.token_ids[-1],))
            self.rows.append(row)
        self._seq_ids = [row.seq_id for row in self.rows]
        return step, dead

    def note_planned(self) -> None:
        """Notes that the rows are part of a plan: the KV cache has all beams, and knows their tokens."""
        self.open_seq_ids.update(self._seq_ids)
        self.rows = [BeamRow(seq_id, None, ()) for seq_id in self._seq_ids]


def _num_common(token_ids: SequenceOf[list[int]]) -> int:
    """How many first tokens all have in common."""
    columns = enumerate(zip(*token_ids, strict=True))
    return next((index for index, column in columns if len(set(column)) > 1), len(token_ids[0]))
