"""The editors of logits that every sampler has, in the order in which they are applied: whoever adds one adds it here.

`SamplingParams` documents the order of all options.
"""

from __future__ import annotations

from services.dense_worker.sampling.editors.allowed_tokens import AllowedTokens
from services.dense_worker.sampling.editors.bad_words import BadWords
from services.dense_worker.sampling.editors.logit_bias import LogitBias
from services.dense_worker.sampling.editors.min_tokens import MinTokens
from services.dense_worker.sampling.editors.penalties import Penalties
from services.dense_worker.sampling.editors.reasoning_limit import ReasoningLimit
from services.dense_worker.sampling.editors.timestamps import Timestamps
from services.dense_worker.sampling.logits_editor import LogitsEditor

EDITORS: tuple[type[LogitsEditor], ...] = (
    LogitBias,
    Penalties,
    BadWords,
    MinTokens,
    Timestamps,
    AllowedTokens,
    ReasoningLimit,
)
