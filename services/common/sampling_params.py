"""The sampling options of one request, as gateway and dense worker use them.

The gateway builds and validates them, the journal keeps them, and the dense worker's sampler applies them.
The options, the token ids so far and the model's logits determine every later token: samplers have no other state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from services.common.errors import InvalidRequest
from services.common.structured_output import StructuredOutput

GREEDY_BELOW = 1e-5  # a smaller temperature would always pick the most likely token anyway
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0
MAX_SEED = 2**64 - 1
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_BAD_TOKEN_SEQUENCES = 128
MAX_BAD_WORD_TOKENS = 64
MAX_ALLOWED_TOKENS = 1024
MAX_LOGPROB_TOKENS = 128
MAX_PRIORITY = 100  # the most urgent one is -100


@dataclass(frozen=True, slots=True)
class Number:
    """The range of an option that is one number; messages and the bodies of HTTP have a field of its name."""

    default: float
    low: float
    high: float = math.inf
    is_low_excluded: bool = False
    description: str | None = None  # for clients of HTTP; None: the field's name says it

    def check(self, name: str, value: float) -> None:
        """Raises `InvalidRequest`, naming option, value and limit, for a value out of the range."""
        if self.low <= value <= self.high and value != math.inf and not (self.is_low_excluded and value == self.low):
            return
        if not math.isfinite(value):
            raise InvalidRequest(f"{name} is {value}, must be a finite number", _field(name))
        if self.high == math.inf:
            bound = f"at least {self.low:g}"
        elif self.is_low_excluded:
            bound = f"above {self.low:g} and at most {self.high:g}"
        else:
            bound = f"from {self.low:g} to {self.high:g}"
        raise InvalidRequest(f"{name} is {value}, must be {bound}", _field(name))


def number(default: float, low: float, high: float = math.inf, **options: Any) -> Any:
    """A field of `SamplingParams` with a `Number`; the type of its default is its own."""
    return field(default=default, metadata={Number: Number(default, low, high, **options)})


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """The longest reasoning of an output. Where it is reached, the end marker is the only token that is sampled."""

    max_tokens: int  # output tokens before the end marker, the begin marker included
    end_token_id: int
    begin_token_id: int | None = None  # among the first 4 output tokens or not at all; None: it has begun already


@dataclass(frozen=True, slots=True)
class TimestampRules:
    """How text and timestamps alternate in the output of a speech model (arXiv:2212.04356, section 3.3).

    An output begins with a timestamp. They come in pairs, never go back, and one is sampled wherever all timestamps
    together are more likely than any other token.
    """

    first_token_id: int  # the timestamp of 0 s; higher ids are later ones. The token before it is never sampled
    end_token_id: int  # of an output; all lower ids are text
    last_initial_token_id: int | None = None  # the latest timestamp that an output may begin with; None: any


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick the next token from the logits. The defaults sample from the model's own distribution.

    They are applied in this order, each to the result of the one before: `logit_bias`, repetition, frequency and
    presence penalty, `bad_words`, `min_tokens`, `timestamps`, `allowed_token_ids`, `reasoning_limit`,
    `structured_output`, temperature, `top_k`, `top_p`, `min_p`. Where those before `structured_output` exclude all
    tokens that continue the grammar, they do not apply: the grammar wins.
    """

    # Below 1e-5 the most likely token is taken (greedy).
    temperature: float = number(
        1.0, 0.0, MAX_TEMPERATURE, description="0 is greedy, 1 is the model's own distribution"
    )
    top_k: int | None = None  # >= 1: keep the k most likely tokens and all that tie with the last; None: all
    # Keep the fewest most likely tokens that together reach this probability.
    top_p: float = number(1.0, 0.0, 1.0, is_low_excluded=True)
    min_p: float = number(0.0, 0.0, 1.0)  # drop tokens below this fraction of the most likely one's probability
    # Above 1 it makes tokens of prompt and output less likely.
    repetition_penalty: float = number(1.0, 0.0, MAX_REPETITION_PENALTY, is_low_excluded=True)
    presence_penalty: float = number(0.0, -MAX_PENALTY, MAX_PENALTY)  # taken off the logits of tokens in the output
    frequency_penalty: float = number(0.0, -MAX_PENALTY, MAX_PENALTY)  # the same, once per occurrence
    # No stop token is sampled before this many output tokens.
    min_tokens: int = number(0, 0, description="The answer has at least this many tokens")
    seed: int = 0  # [0, 2**64): same seed, options, token ids and logits => same next token
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, [-100, 100]): added to the token's logit
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids of each word: the output contains no such sequence
    # Only these tokens are sampled (EOS too must be listed); empty: all tokens. No token twice. Where bad words and
    # `min_tokens` exclude all of these tokens, all of them are equally likely.
    allowed_token_ids: tuple[int, ...] = ()
    structured_output: StructuredOutput | None = None  # how its text is structured; None: any text
    timestamps: TimestampRules | None = None  # None: the output has none
    reasoning_limit: ReasoningLimit | None = None  # None: reasoning is not limited
    # Tokens whose log-probabilities are reported wherever any are; no effect on what is sampled. No token twice.
    logprob_token_ids: tuple[int, ...] = ()
    # Whether log-probabilities of output tokens are of what they were drawn from (-inf: dropped), not of the model.
    # No effect on what is sampled.
    sampled_logprobs: bool = False

    @property
    def given(self) -> set[str]:
        """The names of the options that are not their defaults."""
        return {name for name, default in _DEFAULTS.items() if getattr(self, name) != default}

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken, so that filters and seed have no effect."""
        return self.temperature < GREEDY_BELOW

    @property
    def depends_on_output(self) -> bool:
        """Whether an option makes the next token depend on the output's last ones, besides its grammar."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        has_rules = self.reasoning_limit is not None or self.timestamps is not None
        return penalties != (1.0, 0.0, 0.0) or bool(self.bad_words) or has_rules

    def validate(self) -> None:
        """Raises `InvalidRequest`, naming option, value and limit, for the first option out of its range."""
        for name, option in NUMBERS.items():
            option.check(name, getattr(self, name))
        if self.top_k is not None and self.top_k < 1:
            raise InvalidRequest(f"top_k is {self.top_k}, must be at least 1 (omit it to keep all tokens)", "top_k")
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequest(f"seed is {self.seed}, must be from 0 to {MAX_SEED} (2**64 - 1)", "seed")
        if self.logit_bias:
            _check_count("logit_bias", "tokens", len(self.logit_bias), 0, MAX_LOGIT_BIASES)
            for token_id, bias in self.logit_bias:
                _BIAS.check(f"logit_bias[{token_id}]", bias)
        if self.bad_words:
            _check_count("bad_words", "words", len(self.bad_words), 0, MAX_BAD_TOKEN_SEQUENCES)
            for i, word in enumerate(self.bad_words):
                _check_count(f"bad_words[{i}]", "tokens", len(word), 1, MAX_BAD_WORD_TOKENS)
        if self.allowed_token_ids:
            _check_count("allowed_token_ids", "tokens", len(self.allowed_token_ids), 0, MAX_ALLOWED_TOKENS)
        if self.logprob_token_ids:
            _check_count("logprob_token_ids", "tokens", len(self.logprob_token_ids), 0, MAX_LOGPROB_TOKENS)
        if self.structured_output is not None:
            self.structured_output.validate()

    def validate_token_ids(self, vocab_size: int) -> None:
        """Raises `InvalidRequest` for the first option with a token id beyond the vocabulary."""
        _check_token_ids("logit_bias", (token_id for token_id, _ in self.logit_bias), vocab_size)
        for i, word in enumerate(self.bad_words):
            _check_token_ids(f"bad_words[{i}]", word, vocab_size)
        _check_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        _check_token_ids("logprob_token_ids", self.logprob_token_ids, vocab_size)
        if self.timestamps is not None:
            rules = self.timestamps
            ids = (rules.first_token_id, rules.end_token_id, rules.last_initial_token_id or 0)
            _check_token_ids("timestamps", ids, vocab_size)
        if self.reasoning_limit is not None:
            markers = (self.reasoning_limit.end_token_id, self.reasoning_limit.begin_token_id or 0)
            _check_token_ids("reasoning_limit", markers, vocab_size)

    def check_choice(self, stop_token_ids: Iterable[int]) -> None:
        """Raises `InvalidRequest` if bad words and `min_tokens` exclude all of `allowed_token_ids` from the start."""
        if not self.allowed_token_ids:
            return
        left = set(self.allowed_token_ids) - {word[0] for word in self.bad_words if len(word) == 1}
        if self.min_tokens:
            left.difference_update(stop_token_ids)
        if not left:
            raise InvalidRequest(
                f"bad_words and min_tokens exclude all {len(self.allowed_token_ids)} allowed_token_ids",
                "allowed_token_ids",
            )


# The options that are numbers, by name.
NUMBERS: dict[str, Number] = {
    each.name: each.metadata[Number] for each in fields(SamplingParams) if Number in each.metadata
}
_DEFAULTS = {each.name: each.default for each in fields(SamplingParams)}
_BIAS = Number(0.0, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _check_count(name: str, what: str, count: int, low: int, high: int) -> None:
    if not low <= count <= high:
        raise InvalidRequest(f"{name} has {count} {what}, must have {low} to {high}", _field(name))


def _check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{name} has the out-of-vocabulary token {token_id}: must be in [0, {vocab_size})", _field(name)
            )


def _field(name: str) -> str:
    """The field of a name: `logit_bias` for `logit_bias[5]`."""
    return name.partition("[")[0]
