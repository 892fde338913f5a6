"""`SchedulerLimits`: the part of the config that the scheduler needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Policy = Literal["guaranteed_no_evict", "max_utilization", "take_turns"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of a step and of the queue; `SchedulerSection` explains them."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_waiting: int
    policy: Policy
    max_num_waiting_tokens: int = 10_000_000
    priority_ageing_s: float = 1.0
    head_start_s: float = 0.0
    turn_tokens: int = 48  # with fewer, more is copied; with more, fewer sequences fit, and the last ones end later
    return_timeout_s: float = 120.0  # in which an attention worker that has died comes back, or never
    measures_steps: bool = False  # so that prompts do not make steps with streams long; see `PromptPace`
