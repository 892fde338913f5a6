"""Sequences for tests of the dense worker without a gateway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any
from unittest.mock import Mock

from services.common.sampling_params import SamplingParams
from services.dense_worker.engine import sequence as engine
from services.dense_worker.features.grammar.sequence_grammar import SequenceGrammar
from services.dense_worker.features.hidden_states.hidden_states_feature import HiddenStatesFeature
from services.dense_worker.features.prompt_embeds.embeds_loader import LoadedEmbeds
from services.dense_worker.features.prompt_embeds.prompt_embeds_feature import SequenceEmbeds
from services.dense_worker.features.prompt_logprobs.prompt_logprobs_feature import PromptLogprobsFeature
from services.dense_worker.features.prompt_progress.progress_feature import ProgressFeature
from services.dense_worker.features.returned_logits.context_logits import ContextLogitsFeature
from services.dense_worker.features.returned_logits.generation_logits import GenerationLogitsFeature
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.dense_worker.runner.batch_rows import RequestState
from services.grammar.matcher import GrammarMatcher
from services.pb import dense_pb2
from services.step import SequenceSpec

REPORTING = (
    PromptLogprobsFeature(),
    ContextLogitsFeature(),
    GenerationLogitsFeature(),
    HiddenStatesFeature(),
    ProgressFeature(),
)
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
    asked = _take_asked(options)
    spec = SequenceSpec(
        request_id, list(prompt_token_ids), sampling, max_tokens, tuple(sorted(stop_token_ids)), **asked
    )
    return engine.Sequence(seq_id, spec, **{"features": _reports(spec), **options})


def make_state(
    seq_id: int,
    token_ids: Sequence[int],
    num_prompt_tokens: int | None = None,
    sampling: SamplingParams | None = None,
    **options: Any,
) -> RequestState:
    """A sequence as the runner gets it, with all tokens so far; `options` are fields of its spec or of itself."""
    asked = _take_asked(options)
    prompt_token_ids = list(token_ids[:num_prompt_tokens])
    spec = SequenceSpec("r", prompt_token_ids, sampling or SamplingParams(), max_tokens=1000, **asked)
    options.setdefault("num_logprobs", spec.num_logprobs)
    return RequestState(seq_id, spec, list(token_ids), **{"features": _reports(spec), **options})


def _take_asked(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of the spec. `features` is one if it names them; else they are what the sequence has of features."""
    names = _SPEC_FIELDS & options.keys()
    if not isinstance(options.get("features"), dict):
        names.discard("features")
    return {name: options.pop(name) for name in names}


def with_grammar(matcher: GrammarMatcher) -> SequenceGrammar:
    """What a sequence has whose output this matcher follows."""
    return SequenceGrammar("structured_output", Mock(), matcher)


def with_embeds(embeds: LoadedEmbeds, num_prompt_tokens: int) -> SequenceEmbeds:
    """What a sequence has with these vectors in its prompt."""
    return SequenceEmbeds(num_prompt_tokens, Mock(), embeds)


def _reports(spec: SequenceSpec) -> tuple[SequenceFeature, ...]:
    asked = [feature for feature in REPORTING if feature.name in spec.asked_features]
    found = [feature.admit(spec, dense_pb2.Submit(), stream=0) for feature in asked]
    return tuple(each for each in found if each is not None)


def ask(sequence: engine.Sequence, **asked: Any) -> None:
    """Changes what was asked for of a sequence, before anybody has read it."""
    sequence.spec = replace(sequence.spec, **asked)
    sequence.features = _reports(sequence.spec)
