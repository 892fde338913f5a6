"""The options of a beam search, as gateway and dense worker use them."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from services.common.errors import InvalidRequest
from services.pb import sampling_pb2

MAX_LENGTH_PENALTY = 10.0


class EarlyStopping(enum.Enum):
    """When a search ends that has as many ended answers as beams. With fewer it goes on up to max_tokens."""

    HEURISTIC = "heuristic"  # when the best beam, scored at its present length, is not above the worst ended answer
    ALWAYS = "always"  # at once
    NEVER = "never"  # when no beam can get above the worst ended answer at any length


@dataclass(frozen=True, slots=True)
class BeamSearchOptions:
    """A search for the most likely answers: at each token the `num_beams` most likely beginnings are kept.

    The score of an answer is the sum of the log-probabilities of its tokens, divided by its number of tokens to the
    power of `length_penalty`.
    """

    num_beams: int  # at least 2
    num_answers: int  # that are reported, the best ones; at most num_beams
    length_penalty: float = 1.0  # above 0 longer answers score higher; [-10, 10]
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC

    def validate(self) -> None:
        """Raises `InvalidRequest` for a length penalty out of range."""
        penalty = self.length_penalty
        if not (math.isfinite(penalty) and abs(penalty) <= MAX_LENGTH_PENALTY):
            raise InvalidRequest(
                f"length_penalty is {penalty}, must be from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}",
                "length_penalty",
            )


_MESSAGES = {
    EarlyStopping.HEURISTIC: sampling_pb2.EARLY_STOPPING_HEURISTIC,
    EarlyStopping.ALWAYS: sampling_pb2.EARLY_STOPPING_ALWAYS,
    EarlyStopping.NEVER: sampling_pb2.EARLY_STOPPING_NEVER,
}
_VALUES = {message: value for value, message in _MESSAGES.items()}


def encode_beam_search(options: BeamSearchOptions) -> sampling_pb2.BeamSearch:
    """Scores and end of a search as a message, which does not have its numbers of beams and answers."""
    return sampling_pb2.BeamSearch(
        length_penalty=options.length_penalty, early_stopping=_MESSAGES[options.early_stopping]
    )


def decode_beam_search(message: sampling_pb2.BeamSearch, num_beams: int, num_answers: int) -> BeamSearchOptions:
    """The options of a message. Raises `InvalidRequest` for an `early_stopping` that does not exist."""
    if message.early_stopping not in _VALUES:
        raise InvalidRequest(
            f"early_stopping is {message.early_stopping}, must be one of {', '.join(map(str, _VALUES))}",
            "early_stopping",
        )
    length_penalty = message.length_penalty if message.HasField("length_penalty") else 1.0
    return BeamSearchOptions(num_beams, num_answers, length_penalty, _VALUES[message.early_stopping])
