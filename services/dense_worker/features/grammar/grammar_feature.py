"""`GrammarFeature`: sequences whose output has a grammar. Masks let only those tokens through that continue it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from services.common.errors import InvalidRequest
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.grammar.grammar_mask import GrammarMask
from services.dense_worker.features.grammar.grammars import Grammars
from services.dense_worker.features.grammar.sequence_grammar import SequenceGrammar
from services.dense_worker.features.step_part import FeatureRows, StepPart, StepView
from services.grammar.matcher import GrammarMatcher
from services.step import PlanEntries, SequenceSpec, StepResult

if TYPE_CHECKING:
    from services.pb import dense_pb2


@dataclass(frozen=True, slots=True)
class GrammarRows(StepPart):
    """Moves the grammars by the step's tokens."""

    entries: PlanEntries
    rows: FeatureRows
    waits_for_tokens: bool  # a row is sampled, and the step before samples the token that its grammar lacks

    @property
    def is_ready(self) -> bool:
        """Whether no other thread is still finding masks."""
        return all(grammar.matcher.has_found for grammar in self.rows.features)  # asked often: mostly the first has not

    def read(self, result: StepResult) -> None:
        """Each grammar takes the tokens of its sequence. Those that are complete, or fail, end their sequences."""
        indexes, tokens = self.rows.indexes, result.token_ids
        matchers = [grammar.matcher for grammar in self.rows.features]
        if len(tokens) == len(tokens.token_ids) == np.count_nonzero(tokens.counts):  # one of each, as in most steps
            with_tokens, sampled = matchers, list(zip(matchers, tokens.token_ids[indexes].tolist(), strict=True))
        else:
            rows = tokens.rows()
            by_matcher = [(matcher, rows[index]) for matcher, index in zip(matchers, indexes.tolist(), strict=True)]
            with_tokens = [matcher for matcher, token_ids in by_matcher if token_ids]
            sampled = [(matcher, token_id) for matcher, token_ids in by_matcher for token_id in token_ids]
        GrammarMatcher.consume(sampled)
        running = [matcher for matcher in with_tokens if matcher.is_running]
        if len(running) < len(with_tokens):
            ended = set(with_tokens).difference(running)
            for index, grammar in zip(indexes.tolist(), self.rows.features, strict=True):
                if grammar.matcher in ended:
                    error = grammar.matcher.error
                    result.ended[self.entries.seq_ids.item(index)] = error and InvalidRequest(
                        f"the form of the output cannot be followed: {error}", grammar.field_name
                    )
        GrammarMatcher.find_ahead(running)


class GrammarFeature(Feature):
    """Compiles grammars in threads, before their sequences join the queue."""

    name = "structured_output"
    sequence_type = SequenceGrammar
    editors = (GrammarMask,)

    def __init__(self, grammars: Grammars) -> None:
        """`grammars` end with this feature."""
        self._grammars = grammars

    def read_ahead(self) -> None:
        """Begins to read the vocabulary."""
        self._grammars.begin()

    def close(self) -> None:
        """Ends the threads that compile."""
        self._grammars.close()

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceGrammar:
        """A sequence with structured output has a grammar."""
        structure = spec.sampling.structured_output
        assert structure is not None, "it asks for one"
        return SequenceGrammar(structure.field_name, partial(self._grammars.make, spec, tuple(submit.output_token_ids)))

    def prepare_step(self, step: StepView, rows: FeatureRows) -> GrammarRows:
        """Grammars whose sequences are sampled need all tokens before."""
        entries, indexes = step.entries, rows.indexes
        needed = entries.positions[indexes] + entries.num_tokens[indexes]
        if entries.drafts:
            needed -= [len(entries.drafts.get(index, ())) for index in indexes.tolist()]
        lacks_tokens = (entries.num_logits[indexes] > 0) & (step.num_known[indexes] < needed)
        return GrammarRows(entries, rows, bool(lacks_tokens.any()))
