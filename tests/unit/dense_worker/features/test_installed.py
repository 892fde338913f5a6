"""The rooms of a worker suit its model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from services.dense_worker.features.fork_policy import ForkPolicy, ParallelAnswers
from services.dense_worker.features.installed import make_fork_policy


def test_prompts_are_forked_unless_the_model_has_recurrent_layers() -> None:
    without: Any = SimpleNamespace(recurrent_layers=())
    some: Any = SimpleNamespace(recurrent_layers=(1, 3))
    assert isinstance(make_fork_policy(without), ParallelAnswers)
    assert type(make_fork_policy(some)) is ForkPolicy
