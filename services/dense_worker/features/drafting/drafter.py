"""`Drafter`: what proposes draft tokens, by a `Predictor` for each sequence.

A predictor knows which tokens may come next, and how probable that is. Some are forced (`ForcedTokens`), others a model
has drafted on the device (`DevicePredictor`). `Acceptance` learns how often drafts are right.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.features.drafting.device_drafter import DeviceDrafter, DraftRequest
from services.dense_worker.features.sequence_feature import SequenceFeature

MAX_FORCED = 16  # of a sequence in a step
TRIAL_STEPS = 64  # steps without drafts from one trial to the next
DEVICE_RATE = 1 / 16  # weight of the newest draft for any sequence: there are few, and alike for most texts
_RATE = 1 / 8  # weight of the newest draft of a sequence
_TYPICAL_RATE = 1 / 128  # the same over all sequences, if most tokens have a draft


class Drafter:
    """How one method of speculation drafts; this one never does. Engine thread."""

    on_device: DeviceDrafter | None = None  # its part of the model runner; None: it drafts on the host by itself

    def begin(self, sequence: Sequence) -> Predictor:
        """What drafts for a new sequence. A drafter with a part on the device returns a `DevicePredictor`."""
        return Predictor()

    def request(self, predictors: SequenceOf[Predictor], is_held_back: bool) -> DraftRequest | None:
        """What the device drafts after the step under way; None: nothing.

        predictors: of the running sequences, at least one; is_held_back: the next plan waits for the end of the step
        """
        return None

    def note_cost(self, num_steps: float) -> None:
        """How long the device has drafted for the newest request, in steps without drafts."""

    def finish(self, sequence: Sequence) -> None:
        """A sequence has ended, for whatever reason."""


class Predictor:
    """Belongs to one sequence, and has no drafts; subclasses have some.

    Learns how often its drafts are right also when no step has them.
    """

    def follow(self, output_token_ids: list[int]) -> None:
        """Takes the tokens of prompt and output that it has not seen yet. Called before the other methods."""

    def settle(self) -> None:
        """Does what `follow` may leave for later. Called while a step runs, so that the next one need not wait."""

    def chances(self, num_tokens: int) -> list[float]:
        """For each draft of the next tokens, the probability that it and all before it are right; falling."""
        return []

    def next_chances(self, num_tokens: int) -> list[float]:
        """The same for the tokens after the next one, which is being computed."""
        return []

    def draft(self, num_tokens: int) -> list[int]:
        """The next tokens, at most `num_tokens`."""
        return []


@dataclass(slots=True)
class Acceptance:
    """Probabilities that a draft is right: the first one at a new match, and those after a right one."""

    first: float = 0.5
    later: float = 0.8
    typical: Acceptance | None = None  # of all sequences; learns from each draft, too
    rate: float = _TYPICAL_RATE  # weight of the newest draft

    def begin(self) -> Acceptance:
        """That of a new sequence, which begins with the typical one."""
        return Acceptance(self.first, self.later, self, _RATE)

    def observe(self, *, is_first: bool, is_right: bool) -> None:
        """Learns from a draft, whether a step had it or it was only noted."""
        if is_first:
            self.first += self.rate * (is_right - self.first)
        else:
            self.later += self.rate * (is_right - self.later)
        if self.typical is not None:
            self.typical.observe(is_first=is_first, is_right=is_right)


class ForcedTokens(Predictor):
    """Drafts that are certain, as where a grammar leaves no choice.

    Learns how many there usually are after a token that is chosen.
    """

    def __init__(self, feature: SequenceFeature, usual: Acceptance) -> None:
        """feature: that forces them; usual: `first` and `later` are how often there is one, and another one after it"""
        self._feature = feature
        self._usual = usual
        self._num_seen: int | None = None  # output tokens; None: none yet
        self._num_forced = 0  # tokens that were forced after these

    def follow(self, output_token_ids: list[int]) -> None:
        """The feature follows by itself: counts what it forces now."""
        num_new = len(output_token_ids) - (self._num_seen or 0)
        is_chosen = num_new > self._num_forced  # the newest one; those before it were forced
        if self._num_seen is not None and not num_new:
            return
        self._num_seen, self._num_forced = len(output_token_ids), len(self._feature.forced_token_ids)
        if is_chosen:
            for place in range(self._num_forced + 1):
                self._usual.observe(is_first=place == 0, is_right=place < self._num_forced)

    def chances(self, num_tokens: int) -> list[float]:
        """1 for each of the next forced tokens."""
        return [1.0] * min(num_tokens, len(self._feature.forced_token_ids))

    def next_chances(self, num_tokens: int) -> list[float]:
        """Those after the next token: it is forced itself, and more are known, or it is chosen."""
        if self._num_forced:
            return self.chances(1 + num_tokens)[1:]
        usual = self._usual
        return [usual.first * usual.later**place for place in range(num_tokens)]

    def draft(self, num_tokens: int) -> list[int]:
        """The next tokens, at most `num_tokens`."""
        return list(self._feature.forced_token_ids[:num_tokens])


class DevicePredictor(Predictor):
    """What the device has drafted for one sequence. Drafts whose first tokens have come true are kept for the rest."""

    def __init__(self, acceptance: Acceptance, most_drafts: int, num_output_tokens: int) -> None:
        """most_drafts: that the device makes at a time; num_output_tokens: that the sequence has already"""
        self._acceptance = acceptance
        self._most_drafts = most_drafts
        self._num_seen = num_output_tokens
        self._token_ids: list[int] = []  # drafts of the tokens after those seen
        self._is_first = True  # whether none of these has been checked yet

    def take(self, token_ids: SequenceOf[int]) -> None:
        """New drafts, of the tokens after all those that `follow` was given."""
        self._token_ids, self._is_first = list(token_ids), True

    def follow(self, output_token_ids: list[int]) -> None:
        """Compares the tokens of the output that it has not seen yet with their drafts."""
        first, self._num_seen = self._num_seen, len(output_token_ids)
        if not self._token_ids:
            return
        for token_id in output_token_ids[first:]:
            if not self._token_ids:
                break
            is_right = self._token_ids.pop(0) == token_id
            self._acceptance.observe(is_first=self._is_first, is_right=is_right)
            self._is_first = False
            if not is_right:
                self._token_ids.clear()

    def chances(self, num_tokens: int) -> list[float]:
        """See `Predictor.chances`."""
        return self._chances(min(num_tokens, len(self._token_ids)), is_first=self._is_first)

    def next_chances(self, num_tokens: int) -> list[float]:
        """Those of drafts that the device has yet to make, after the step that is being computed."""
        return self._chances(min(num_tokens, self._most_drafts), is_first=True)

    def draft(self, num_tokens: int) -> list[int]:
        """The next tokens, at most `num_tokens`."""
        return self._token_ids[:num_tokens]

    def _chances(self, num_tokens: int, *, is_first: bool) -> list[float]:
        chances, chance = [], 1.0
        for place in range(num_tokens):
            chance *= self._acceptance.first if is_first and place == 0 else self._acceptance.later
            chances.append(chance)
        return chances
