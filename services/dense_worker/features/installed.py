"""The rooms of this folder that a worker has: whoever adds one adds it here."""

from __future__ import annotations

from services.common.families.shape import ModelConfig
from services.dense_worker.features.fork_policy import ForkPolicy, NoForks
from services.dense_worker.features.parallel.parallel_answers import ParallelAnswers


def make_fork_policy(model: ModelConfig) -> ForkPolicy:
    """Which sequences of a model are forked. With gated delta layers none: prompts have no states before their end."""
    return NoForks() if model.gated_delta_layers else ParallelAnswers()
