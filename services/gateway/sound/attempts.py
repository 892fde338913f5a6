"""`best_output`: tries a window of sound again, at higher temperatures, where its output is doubtful.

The thresholds are those of arXiv:2212.04356, section 4.5, and of the code published with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_COMPRESSION_RATIO = 2.4  # above it the text repeats itself
MIN_MEAN_LOGPROB = -1.0
MIN_NO_SPEECH_PROB = 0.6  # above it, an unlikely text is none
MAX_TEMPERATURE_BEFORE = 0.5  # above it, a text is not put before later windows


@dataclass(frozen=True, slots=True)
class Output:
    """What a model wrote of a window."""

    token_ids: list[int]
    temperature: float
    mean_logprob: float  # of its tokens, by the model's own probabilities
    compression_ratio: float  # of its text
    no_speech_prob: float | None = None  # None: unknown, since nothing depended on it


def compression_ratio(text: str) -> float:
    """How many times smaller zlib makes a text; 0 for none."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


async def best_output(
    attempt: Callable[[float], Awaitable[Output]], find_no_speech_prob: Callable[[], Awaitable[float]]
) -> Output:
    """The first output that is neither repetitive nor unlikely, or the last one; without tokens where nobody speaks.

    attempt: the output at a temperature
    find_no_speech_prob: called once at most
    """
    no_speech_prob: float | None = None
    for temperature in TEMPERATURES:
        output = await attempt(temperature)
        if output.mean_logprob < MIN_MEAN_LOGPROB:
            if no_speech_prob is None:
                no_speech_prob = await find_no_speech_prob()
            if no_speech_prob > MIN_NO_SPEECH_PROB:
                return replace(output, token_ids=[], no_speech_prob=no_speech_prob)
        elif output.compression_ratio <= MAX_COMPRESSION_RATIO:
            break
    return replace(output, no_speech_prob=no_speech_prob)
