"""Makes a sequence a beam search, which begins or goes on from beams in a message of `protos/dense.proto`."""

from __future__ import annotations

import math

from services.common.errors import InvalidRequest, PeerError
from services.common.token_logprobs import TokenLogprobs, decode_logprobs
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.features.beams.beam_policy import BeamPolicy
from services.dense_worker.features.beams.search import Beam, Hypothesis, SearchState
from services.pb import dense_pb2

_NO_LOGPROBS = TokenLogprobs(0.0, ())  # of tokens whose log-probabilities are not reported


def prepare_beams(sequence: Sequence, submit: dense_pb2.Submit, vocab_size: int) -> None:
    """Makes a submitted sequence a search. Raises `PeerError` if its gateway would not read the log-probabilities that
    it asks for, and what `add_beams` raises.
    """
    if sequence.spec.num_logprobs is not None and not submit.spec.beam_search.reads_logprob_rows:
        raise PeerError(
            "this gateway does not read this dense worker's log-probabilities of a beam search: it is of an older "
            "version"
        )
    add_beams(sequence, submit.search, vocab_size)


def add_beams(sequence: Sequence, message: dense_pb2.BeamProgress, vocab_size: int) -> None:
    """Makes a new sequence a search. Raises `InvalidRequest` for beams or ended answers that no search has."""
    options = sequence.spec.beam_search
    assert options is not None, "the sequence is a search"
    state = _decode_state(sequence, options.num_beams, message, vocab_size)
    policy = sequence.policy = BeamPolicy(sequence.seq_id, sequence.spec, state)
    sequence.output_token_ids = list(policy.best_token_ids)
    if message.has_run:
        sequence.num_cached_tokens = 0  # of its first opening, which was elsewhere


def _decode_state(
    sequence: Sequence, num_beams: int, message: dense_pb2.BeamProgress, vocab_size: int
) -> SearchState | None:
    max_tokens = sequence.spec.max_tokens
    if not message.beams:
        if message.ended:
            raise InvalidRequest(f"a search has {len(message.ended)} ended answers, without beams it must have none")
        return None
    for name, found in (("beams", message.beams), ("ended answers", message.ended)):
        if len(found) > num_beams:
            raise InvalidRequest(f"a search has {len(found)} {name}, num_beams is {num_beams}")
    lengths = {len(beam.token_ids) for beam in message.beams}
    if len(lengths) > 1 or not 1 <= max(lengths) < max_tokens:
        raise InvalidRequest(
            f"the beams of a search have {sorted(lengths)} tokens, all must have as many, from 1 to max_tokens - 1, "
            f"which is {max_tokens - 1}"
        )
    for answer in message.ended:
        if not 1 <= len(answer.token_ids) <= max(lengths):
            raise InvalidRequest(
                f"an ended answer of a search has {len(answer.token_ids)} tokens, it must have from 1 to as many as "
                f"its beams, which is {max(lengths)}"
            )
    for each in (*message.beams, *message.ended):
        _check_values(each, vocab_size, has_logprobs=sequence.spec.num_logprobs is not None)
    return SearchState(
        [Beam(list(each.token_ids), _decode_logprobs(each), each.score) for each in message.beams],
        [Hypothesis(list(each.token_ids), _decode_logprobs(each), each.score, True) for each in message.ended],
    )


def _check_values(message: dense_pb2.Beam | dense_pb2.BeamAnswer, vocab_size: int, *, has_logprobs: bool) -> None:
    if (largest := max(message.token_ids)) >= vocab_size:
        raise InvalidRequest(f"a beam of a search has token id {largest}, the vocabulary has {vocab_size} tokens")
    if not math.isfinite(message.score):
        raise InvalidRequest(f"a beam of a search has score {message.score}, it must be finite")
    num_expected = len(message.token_ids) if has_logprobs else 0
    if len(message.logprobs) != num_expected:
        raise InvalidRequest(
            f"a beam of a search has {len(message.logprobs)} log-probabilities, it must have {num_expected}"
        )


def _decode_logprobs(message: dense_pb2.Beam | dense_pb2.BeamAnswer) -> list[TokenLogprobs]:
    return [decode_logprobs(each) for each in message.logprobs] or [_NO_LOGPROBS] * len(message.token_ids)
