"""`Speculation`: decides, before each step, which sequences get how many drafts, or whether the step has none.

Drafts cost time: their step cannot be planned ahead, and it computes more tokens. What that costs is measured
(`StepCosts`), and so is how often guesses are right (`Acceptance`). A step gets the drafts that promise the most tokens
per second; while a step without drafts promises as many, steps are planned ahead, as without speculation.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from services.dense_worker.engine.drafts import may_have_drafts
from services.dense_worker.engine.observer import StepStats
from services.dense_worker.engine.sequence import Sequence, SequenceOutput
from services.dense_worker.engine.speculation.acceptance import Acceptance
from services.dense_worker.engine.speculation.answer_history import AnswerHistory
from services.dense_worker.engine.speculation.forced_tokens import ForcedTokens
from services.dense_worker.engine.speculation.predictor import Predictor
from services.dense_worker.engine.speculation.step_costs import StepCosts

SEQS_PER_LOOK = 32  # of so many more sequences, texts are looked at one step less often
MIN_GAIN = 1.05  # drafts must promise so many times the tokens per second: estimates have errors


class Speculation:
    """A `DraftSource`, and an `EngineObserver` that measures the steps. Runs on the engine thread."""

    def __init__(
        self, lengths: SequenceOf[int], num_drafts: int, costs: StepCosts, history: AnswerHistory | None = None
    ) -> None:
        """lengths: of the n-grams to look for, rising; num_drafts: most drafts of a sequence in a step"""
        self._lengths = lengths
        self._num_drafts = num_drafts
        self._costs = costs
        self._history = history
        self._acceptance = Acceptance()
        self._allotted: dict[int, int] = {}  # number of drafts in the step being planned, by seq_id
        self._has_drafts = False  # whether the newest plan has drafts
        self._num_unwatched = 0  # steps since texts were last looked at for guesses, if nothing came of it
        self._was_busy = False  # whether sequences were running when the last step ended

    def waits(self, running: SequenceOf[Sequence], max_num_drafts: int) -> bool:
        """Whether the next step promises more tokens per second if it is planned later, with drafts."""
        if self._has_drafts:
            return True
        if max_num_drafts <= 0:
            return False
        decodes = []
        for sequence in running:
            num_remaining = sequence.num_remaining_tokens
            if num_remaining > 1:
                return False  # the next step computes a prompt
            if num_remaining == 1:
                decodes.append(sequence)
        ahead_s = self._costs.cost(len(decodes), is_ahead=True) if decodes else None
        self._num_unwatched += 1
        if ahead_s is None or self._num_unwatched <= len(decodes) // SEQS_PER_LOOK:
            return False
        self._num_unwatched = 0
        chances = []
        for sequence in decodes:
            if (predictor := self._follow(sequence)) is not None:
                # The first guess is the token that is being computed, the others would be drafts.
                chances += predictor.chances(1 + self._num_drafts)[1:]
        num_drafts, rate = self._choose(len(decodes), sorted(chances, reverse=True), max_num_drafts, ahead_s)
        return num_drafts > 0 and rate * ahead_s > MIN_GAIN * len(decodes)

    def begin_step(self, decodes: SequenceOf[Sequence], max_num_drafts: int) -> None:
        """Divides the drafts of a step among its sequences."""
        self._has_drafts = False
        self._allotted.clear()
        if max_num_drafts <= 0 or any(sequence.num_pending_tokens for sequence in decodes):
            return
        chances = []
        for sequence in decodes:
            if (predictor := self._follow(sequence)) is not None:
                chances += [(chance, sequence.seq_id) for chance in predictor.chances(self._num_drafts)]
        chances.sort(key=lambda each: -each[0])
        ahead_s = self._costs.cost(len(decodes), is_ahead=True) if chances else None
        if ahead_s is None:
            return
        num_drafts, _ = self._choose(len(decodes), [chance for chance, _ in chances], max_num_drafts, ahead_s)
        for _, seq_id in chances[:num_drafts]:
            self._allotted[seq_id] = self._allotted.get(seq_id, 0) + 1

    def propose(self, sequence: Sequence, max_num_tokens: int) -> SequenceOf[int]:
        """The drafts of a sequence in the step that is being planned."""
        num_tokens = min(self._allotted.get(sequence.seq_id, 0), max_num_tokens)
        predictor = sequence.predictor if sequence.grammar is None else ForcedTokens(sequence.grammar)
        if num_tokens <= 0 or predictor is None:
            return ()
        drafts = predictor.guess(num_tokens)
        self._has_drafts = self._has_drafts or bool(drafts)
        return drafts

    def finish(self, sequence: Sequence) -> None:
        """Keeps the answer for later ones."""
        if self._history is not None and len(sequence.output_token_ids) > self._lengths[0]:
            self._history.add(sequence)

    def on_step(self, stats: StepStats, started: Iterable[Sequence], outputs: Iterable[SequenceOutput]) -> None:
        """Notes what a step has cost, if it only decoded and followed another one without a pause."""
        was_busy, self._was_busy = self._was_busy, stats.num_running > 0
        if stats.num_seqs and stats.num_tokens == stats.num_sampled and was_busy:
            is_ahead = stats.gap_s == 0.0
            self._costs.record(stats.num_tokens, stats.gap_s + stats.duration_s, is_ahead=is_ahead)

    def on_handoff_abort(self) -> None:
        """The plans under way are void."""
        self._has_drafts = self._was_busy = False

    def _follow(self, sequence: Sequence) -> Predictor | ForcedTokens | None:
        """The predictor of a sequence, which knows all of its tokens; None if it may have no drafts."""
        if not may_have_drafts(sequence):
            return None
        if sequence.grammar is not None:
            return ForcedTokens(sequence.grammar)
        if sequence.predictor is None:
            earlier = [] if self._history is None else self._history.find(sequence)
            sequence.predictor = Predictor(
                self._lengths, self._acceptance.begin(), sequence.prompt_token_ids, earlier
            )
        sequence.predictor.follow(sequence.output_token_ids)
        return sequence.predictor

    def _choose(
        self, num_seqs: int, chances: SequenceOf[float], max_num_drafts: int, ahead_s: float
    ) -> tuple[int, float]:
        """The number of drafts with the most tokens per second, and these; the step is planned after the one before.

        chances: of the drafts to be accepted, falling. A size that has not been measured counts as much as the next
        smaller one, so that it is measured, and larger ones only after it.
        """
        cost_s = self._costs.cost(num_seqs, is_ahead=False) or ahead_s
        best = 0, num_seqs / cost_s
        num_tokens, num_drafts, limit = float(num_seqs), 0, min(len(chances), max_num_drafts)
        while num_drafts < limit:
            size = self._costs.size_of(num_seqs + num_drafts + 1)
            stop = min(size - num_seqs, limit)  # a step of a size costs the same however full it is
            num_tokens += sum(chances[num_drafts:stop])
            num_drafts = stop
            measured_s = self._costs.cost(size, is_ahead=False)
            cost_s = measured_s or cost_s
            if num_tokens / cost_s > best[1]:
                best = num_drafts, num_tokens / cost_s
            if measured_s is None:
                break
        return best
