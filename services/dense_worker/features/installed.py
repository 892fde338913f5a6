"""The rooms of this folder that a worker has: whoever adds one adds it here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from services.common.families.shape import ModelConfig
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.features.beams.add_beams import add_beams
from services.dense_worker.features.fork_policy import ForkPolicy, NoForks
from services.dense_worker.features.parallel.parallel_answers import ParallelAnswers
from services.pb import dense_pb2


def make_fork_policy(model: ModelConfig) -> ForkPolicy:
    """Which sequences of a model are forked. With gated delta layers none: prompts have no states before their end."""
    return NoForks() if model.gated_delta_layers else ParallelAnswers()


def prepare_policy(sequence: Sequence, submit: dense_pb2.Submit, vocab_size: int) -> Awaitable[None] | None:
    """Gives a new sequence its row policy, before it joins the queue. None: it has none.

    Does not block the event loop; raises `InvalidRequest` if there is no such policy.
    """
    if sequence.spec.beam_search is None:
        return None
    return asyncio.to_thread(add_beams, sequence, submit.search, vocab_size)  # which may be millions of values


def has_progress(submit: dense_pb2.Submit) -> bool:
    """Whether a sequence is submitted again, with tokens or with what its row policy had found."""
    return bool(submit.output_token_ids or submit.search.beams)
