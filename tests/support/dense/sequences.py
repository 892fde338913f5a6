"""Sequences for tests of the dense worker without a gateway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from services.common.sampling_params import SamplingParams
from services.dense_worker.engine import sequence as engine
from services.dense_worker.runner.request_state import RequestState
from services.step import SequenceSpec

_SPEC_FIELDS = {field.name for field in fields(SequenceSpec)}


def new_sequence(
    seq_id: int,
    request_id: str,
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    max_tokens: int,
    stop_token_ids: Iterable[int] = (),
    **options: Any,
) -> engine.Sequence:
    """A sequence that has just been submitted; `options` are fields of its spec or of itself."""
    asked = {name: options.pop(name) for name in _SPEC_FIELDS & options.keys()}
    spec = SequenceSpec(
        request_id, list(prompt_token_ids), sampling, max_tokens, tuple(sorted(stop_token_ids)), **asked
    )
    options.setdefault("reports_prompt_logprobs", spec.num_prompt_logprobs is not None)
    options.setdefault("token_report", spec.token_report)
    return engine.Sequence(seq_id, spec, **options)


def make_state(
    seq_id: int,
    token_ids: Sequence[int],
    num_prompt_tokens: int | None = None,
    sampling: SamplingParams | None = None,
    **options: Any,
) -> RequestState:
    """A sequence as the runner gets it, with all tokens so far; `options` are fields of its spec or of itself."""
    asked = {name: options.pop(name) for name in _SPEC_FIELDS & options.keys()}
    prompt_token_ids = list(token_ids[:num_prompt_tokens])
    spec = SequenceSpec("r", prompt_token_ids, sampling or SamplingParams(), max_tokens=1000, **asked)
    options.setdefault("num_logprobs", spec.num_logprobs)
    options.setdefault("reports_prompt_logprobs", spec.num_prompt_logprobs is not None)
    options.setdefault("token_report", spec.token_report)
    return RequestState(seq_id, spec, list(token_ids), **options)


def ask(sequence: engine.Sequence, **asked: Any) -> None:
    """Changes what was asked for of a sequence, before anybody has read it."""
    sequence.spec = replace(sequence.spec, **asked)
