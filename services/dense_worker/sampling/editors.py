"""`EDITORS`: everything that changes logits before sampling. A new editor is a file of its own and a line here."""

from __future__ import annotations

from services.dense_worker.sampling.allowed_tokens import AllowedTokens
from services.dense_worker.sampling.bad_words import BadWords
from services.dense_worker.sampling.grammar_mask import GrammarMask
from services.dense_worker.sampling.logit_bias import LogitBias
from services.dense_worker.sampling.logits_editor import LogitsEditor
from services.dense_worker.sampling.min_tokens import MinTokens
from services.dense_worker.sampling.penalties import Penalties
from services.dense_worker.sampling.reasoning_limit import ReasoningLimit

# In the order of application, which `SamplingParams` documents.
EDITORS: tuple[type[LogitsEditor], ...] = (
    LogitBias,
    Penalties,
    BadWords,
    MinTokens,
    AllowedTokens,
    ReasoningLimit,
    GrammarMask,
)
