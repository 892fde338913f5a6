"""The first rank's backend is a whole `DenseBackend`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from services.dense_worker.backends import DenseBackend
from services.dense_worker.ranks.leading_backend import LeadingBackend, LeadingRanks
from services.pb import shard_pb2
from services.step import PlanEntries, PlanEntry, StepPlan


def test_it_has_all_that_a_backend_has() -> None:
    own: Any = SimpleNamespace(takes_input_embeds=True, gives_hidden_states=True, logits_dtype=torch.bfloat16)
    operations: Any = SimpleNamespace(use_group=lambda group: None, share_tokens=lambda token_ids: None)
    backend: Any = LeadingBackend(own, operations)
    methods = [name for name, value in vars(DenseBackend).items() if callable(value) and not name.startswith("_")]
    values = {name: getattr(backend, name) for name in DenseBackend.__annotations__}
    assert {"first", "last"} < {*methods} and all(callable(getattr(backend, name)) for name in methods)
    assert values == {
        "takes_input_embeds": True,
        "captures_embeds": False,
        "gives_hidden_states": True,
        "logits_dtype": torch.bfloat16,
        "always_ends": False,
        "skips_logits": False,
    }


def test_the_other_ranks_are_told_of_rows_whose_hidden_states_are_needed() -> None:
    """Also in a step that needs no logits: then they have run no rows of the last part."""
    called: list[int] = []

    def last(attn_out: Any, residual: Any, rows: torch.Tensor, hidden_out: torch.Tensor) -> torch.Tensor:
        called.append(len(rows))
        hidden_out.copy_(rows[:, None])
        return torch.zeros(len(rows), 1)

    own: Any = SimpleNamespace(gives_hidden_states=True, logits_dtype=torch.float32, last=last)
    operations: Any = SimpleNamespace(use_group=lambda group: None, share_tokens=lambda token_ids: None)
    backend, sent = LeadingBackend(own, operations), list[list[int]]()
    group: Any = None
    backend.use_ranks(LeadingRanks([group], lambda command: sent.append(list(command.further_rows.rows)), Mock()))
    hidden_out = torch.zeros(300, 1)
    backend.hidden(torch.zeros(0), torch.zeros(0), torch.arange(300), hidden_out)
    assert hidden_out[:, 0].tolist() == list(range(300))
    assert sent == [[*range(256)], [*range(256, 300)]] and called == [256, 44]


@pytest.mark.parametrize("num_sampled", [0, 2])
def test_the_other_ranks_are_told_of_rows_that_the_plan_does_not_name(num_sampled: int) -> None:
    """Also of the first ones that a step computes, if it samples none: as a part of a prompt does."""
    own: Any = Mock(gives_hidden_states=True, logits_dtype=torch.float32)
    backend, sent = LeadingBackend(own, Mock()), list[shard_pb2.ShardCommand]()
    backend.use_ranks(LeadingRanks([Mock()], sent.append, Mock()))
    nothing = torch.zeros(0)
    for step_id in (1, 2):
        backend.begin_step(StepPlan(step_id), 8, num_sampled)
        backend.first(torch.zeros(8, dtype=torch.int64), nothing)
        if num_sampled:
            backend.last(nothing, nothing, torch.arange(num_sampled))
        backend.last(nothing, nothing, torch.arange(3))
    told = [list(each.further_rows.rows) for each in sent if each.HasField("further_rows")]
    assert told == [[0, 1, 2], [0, 1, 2]]


def test_the_other_ranks_are_told_of_the_slots_of_the_rows() -> None:
    """Also in a step that warms up what rows with adapters run, whatever the step before had. No step has others."""
    own: Any = SimpleNamespace(gives_hidden_states=True, logits_dtype=torch.float32, begin_step=lambda *arguments: None)
    lora: Any = SimpleNamespace(is_active=False, row_slots=None)
    backend, sent = LeadingBackend(own, Mock(), lora), list[shard_pb2.ShardCommand]()
    backend.use_ranks(LeadingRanks([Mock()], sent.append, Mock()))
    entries = PlanEntries.of([PlanEntry(seq_id=1, position=0, num_tokens=3, num_logits=1)])
    backend.begin_step(StepPlan(1, entries=entries), 3)
    lora.is_active = True
    backend.begin_step(StepPlan(0), 3)
    lora.row_slots = np.array([1, -1, 0])
    backend.begin_step(StepPlan(2, entries=entries), 3)
    backend.begin_step(StepPlan(0), 2)
    backend.begin_step(StepPlan(0), 3)
    told = [[], [-1, -1, -1], [1, -1, 0], [-1, -1], [-1, -1, -1]]
    assert [list(each.step.row_slots) for each in sent] == told
    for row_slots in (np.array([1, -1]), None):
        lora.row_slots = row_slots
        with pytest.raises(AssertionError, match=r"step 3 has 3 rows, and [02] have slots"):
            backend.begin_step(StepPlan(3, entries=entries), 3)
    assert len(sent) == len(told)


def test_what_is_sent_names_the_lane() -> None:
    """Also where a plan of no lane warms up."""
    own: Any = SimpleNamespace(
        gives_hidden_states=True, logits_dtype=torch.float32, last=Mock(), begin_step=lambda *arguments: None
    )
    operations: Any = SimpleNamespace(use_group=Mock(), share_tokens=lambda token_ids: None)
    backend, sent, groups = LeadingBackend(own, operations), list[shard_pb2.ShardCommand](), [Mock(), Mock()]
    backend.use_ranks(LeadingRanks(groups, sent.append, Mock()).of_lane(1))
    backend.begin_step(StepPlan(0), 8, 4)
    backend.begin_step(StepPlan(1, lane=1), 8, 4)
    backend._has_logits = True
    backend.last(torch.zeros(0), torch.zeros(0), torch.arange(3))
    operations.use_group.assert_called_once_with(groups[1])
    assert [each.step.plan.lane for each in sent[:2]] == [1, 1]
    assert (sent[2].further_rows.lane, list(sent[2].further_rows.rows)) == (1, [0, 1, 2])
