"""The runner learns of sequences only from plans: drafts, forks, closings, and reused ids while steps are running."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.common.sampling_params import SamplingParams
from services.dense_worker.runner.batch_rows import RequestState
from services.dense_worker.runner.model_runner import ModelRunner
from services.dense_worker.runner.step_tokens import verify
from services.dense_worker.sampling.sampler import Sampler
from services.step import Fork, PlanEntry, StepPlan
from tests.support.dense.sequences import make_state
from tests.support.plans import plan_of

VOCAB_SIZE = 64
NUM_LAYERS = 2
CHANNEL: Any = SimpleNamespace(
    qkv=torch.empty(32, 1),
    attn_out=torch.empty(32, 1),
    begin_step=lambda step_id, num_rows: None,
    begin_layers=lambda num_rows: None,
    signal=lambda flag: None,
    wait=lambda flag: None,
    fetch_attn_out=lambda num_tokens: torch.empty(num_tokens, 1),
)


class NextNumber:
    """A `DenseBackend` whose model counts: after token t comes t + 1. Records its inputs."""

    always_ends = False

    def __init__(self) -> None:
        self.fed: list[list[int]] = []
        self.begun: list[tuple[int, int]] = []  # id and number of tokens of each step

    def begin_step(self, plan: StepPlan, num_tokens: int, num_sampled: int = 0, input_embeds: object = None) -> None:
        self.begun.append((plan.step_id, num_tokens))

    def first(self, token_ids: torch.Tensor, qkv: torch.Tensor, input_embeds: object = None) -> torch.Tensor:
        self.fed.append(token_ids.tolist())
        return token_ids[:, None]

    def middle(
        self, layer: int, attn_out: torch.Tensor, residual: torch.Tensor, qkv: torch.Tensor, added: object
    ) -> torch.Tensor:
        return residual

    def last(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden_out: object = None
    ) -> torch.Tensor:
        return torch.nn.functional.one_hot((residual[rows, 0] + 1) % VOCAB_SIZE, VOCAB_SIZE).float()


def make_runner(max_num_seqs: int = 2) -> tuple[ModelRunner, NextNumber]:
    backend = NextNumber()
    runner = ModelRunner(backend, Sampler(max_num_seqs, VOCAB_SIZE, "cpu"), NUM_LAYERS, max_num_seqs)
    runner.attach([CHANNEL])
    return runner, backend


def new(seq_id: int, *token_ids: int) -> RequestState:
    return make_state(seq_id, token_ids, len(token_ids), SamplingParams(temperature=0.0))


def test_right_drafts_are_kept_and_wrong_ones_are_rolled_back() -> None:
    runner, backend = make_runner()
    runner.open(new(1, 5, 6))
    plan = plan_of(1, PlanEntry(1, 0, 5, 4, (7, 8, 30)))
    assert runner.launch(plan, CHANNEL).collect().token_ids.rows() == [[7, 8, 9]]
    assert backend.fed == [[5, 6, 7, 8, 30]]
    plan = plan_of(2, PlanEntry(1, 4, 2, 2, (10,)))  # back to the token after the last right draft
    assert runner.launch(plan, CHANNEL).collect().token_ids.rows() == [[10, 11]]
    assert backend.fed[1] == [9, 10]


@pytest.mark.parametrize(
    ("drafts", "sampled", "accepted"),
    [((), [4], [4]), ((4,), [4, 5], [4, 5]), ((4, 9), [4, 5, 6], [4, 5]), ((9, 5), [4, 5, 6], [4]), ((), [], [])],
)
def test_a_row_counts_only_if_all_previous_drafts_are_right(
    drafts: tuple[int, ...], sampled: list[int], accepted: list[int]
) -> None:
    assert verify(drafts, sampled) == accepted


def test_a_fork_continues_its_parents_tokens_in_its_own_slot() -> None:
    runner, backend = make_runner()
    runner.open(new(1, 5, 6))
    runner.launch(plan_of(1, PlanEntry(1, 0, 2, 1)), CHANNEL).collect()
    plan = plan_of(2, PlanEntry(1, 2, 1, 1), PlanEntry(2, 2, 2, 2, (20,)), forks=(Fork(1, 2, 2),), forced=((2, 7),))
    assert runner.launch(plan, CHANNEL).collect().token_ids.rows() == [[8], [8]]
    runner.launch(plan_of(3, PlanEntry(2, 3, 1, 1), close_seq_ids=(1,)), CHANNEL).collect()
    assert backend.fed == [[5, 6], [7, 7, 20], [8]]
    assert backend.begun == [(1, 2), (2, 3), (3, 1)]


def test_a_fork_that_was_opened_has_options_of_its_own() -> None:
    """It takes its parent's tokens up to the fork, the next one from the plan, and its own bias for 30."""
    runner, backend = make_runner()
    runner.open(new(1, 5, 6, 7))
    biased = SamplingParams(temperature=0.0, logit_bias=((30, 100.0),))
    runner.open(make_state(2, (5, 6, 7), 3, biased))
    runner.launch(plan_of(1, PlanEntry(1, 0, 3, 1)), CHANNEL).collect()
    plan = plan_of(2, PlanEntry(1, 3, 1, 1), PlanEntry(2, 2, 1, 1), forks=(Fork(1, 2, 2),), forced=((2, 7),))
    assert runner.launch(plan, CHANNEL).collect().token_ids.rows() == [[9], [30]]
    plan = plan_of(3, PlanEntry(2, 3, 1, 1), close_seq_ids=(1,))
    assert runner.launch(plan, CHANNEL).collect().token_ids.rows() == [[30]]
    assert backend.fed == [[5, 6, 7], [8, 7], [30]]


def test_forced_tokens_take_the_place_of_sampled_ones() -> None:
    """The scheduler chooses 30 and 31 after token 6, whose most likely successor is 7, for a sequence and its fork."""
    runner, backend = make_runner()
    runner.open(replace(new(1, 5, 6), has_forced_tokens=True, num_logprobs=2))
    first = runner.launch(plan_of(1, PlanEntry(1, 0, 2, 1)), CHANNEL).collect()
    assert first.logprobs[1][0].top[0][0] == 7
    entries = (PlanEntry(1, 2, 1, 1), PlanEntry(2, 2, 1, 1))
    plan = plan_of(2, *entries, forks=(Fork(1, 2, 2),), forced=((1, 30), (2, 31)))
    second = runner.launch(plan, CHANNEL).collect()
    assert [second.logprobs[seq_id][0].top[0][0] for seq_id in (1, 2)] == [31, 32]
    plan = plan_of(3, PlanEntry(1, 3, 1, 1), close_seq_ids=(2,), forks=(Fork(1, 2, 3),), forced=((1, 40), (2, 50)))
    runner.launch(plan, CHANNEL).collect()
    runner.launch(plan_of(4, PlanEntry(2, 3, 1, 1)), CHANNEL).collect()
    assert backend.fed == [[5, 6], [30, 31], [40], [50]]


def test_an_id_can_be_reused_while_a_step_of_the_first_sequence_runs() -> None:
    """A plan keeps the sequences that its ids meant when it was published, even if it runs later."""
    runner, backend = make_runner()
    runner.open(new(1, 5, 6))
    first = runner.launch(plan_of(1, PlanEntry(1, 0, 2, 1)), CHANNEL)
    closing = runner.launch(StepPlan(2, close_seq_ids=(1,)), CHANNEL)
    runner.open(new(1, 40, 41, 42))
    assert first.collect().token_ids.rows() == [[7]]
    assert closing.collect().token_ids.rows() == []
    assert runner.launch(plan_of(3, PlanEntry(1, 0, 3, 1)), CHANNEL).collect().token_ids.rows() == [[43]]
    assert backend.fed == [[5, 6], [40, 41, 42]]
    assert backend.begun == [(1, 2), (3, 3)], "a plan that only closes sequences runs no step"


def test_slots_of_closed_sequences_are_reused() -> None:
    runner, _ = make_runner(max_num_seqs=1)
    for seq_id in range(1, 6):
        runner.open(new(seq_id, seq_id))
        runner.open(new(100 + seq_id, 3))
        entry = PlanEntry(seq_id, 0, 1, 1)
        assert runner.launch(plan_of(seq_id, entry), CHANNEL).collect().token_ids.rows() == [[seq_id + 1]]
        runner.launch(StepPlan(10 + seq_id, close_seq_ids=(seq_id, 100 + seq_id)), CHANNEL).collect()


def test_each_row_is_sampled_with_the_position_of_the_next_token() -> None:
    """Noise and `min_tokens` depend on this position, so drafts must not shift it."""
    runner, _ = make_runner()
    runner.open(new(1, 5, 6, 7))
    step = runner.prepare(runner.bind(plan_of(1, PlanEntry(1, 1, 4, 3, (20, 21)))))
    assert step.token_ids.tolist() == [6, 7, 20, 21]  # tokens 1 to 4 of the sequence
    assert step.sampled_rows.tolist() == [1, 2, 3]
    assert step.positions.tolist() == [3, 4, 5]
    assert step.output_lens.tolist() == [0, 1, 2]


def test_a_step_can_be_run_in_two_parts() -> None:
    """A step that is launched in between has the tokens of the running one."""
    runner, _ = make_runner()
    events: list[str] = []
    channel = SimpleNamespace(**vars(CHANNEL))
    channel.signal, channel.wait = (lambda flag, name=name: events.append(name) for name in ("signal", "wait"))
    runner.attach([channel])
    runner.open(new(1, 5, 6))
    running = runner.launch(plan_of(1, PlanEntry(1, 0, 2, 1)), channel)
    assert running.runs_when_collected
    running.run_most()
    assert events == ["signal", "wait", "signal"]
    ahead = runner.launch(plan_of(2, PlanEntry(1, 2, 1, 1)), channel)
    assert running.collect().token_ids.rows() == [[7]]
    assert events == ["signal", "wait", "signal", "wait"]
    assert ahead.collect().token_ids.rows() == [[8]]
    closing = runner.launch(plan_of(3, close_seq_ids=(1,)), channel)
    closing.run_most()
    assert closing.collect().token_ids.rows() == []


def test_sequences_that_begin_early_change_what_others_had_prepared_within_the_first_layer() -> None:
    """A table of the sampler that a step has made larger gets the next one's values, whatever part of it ran first."""
    runner, _ = make_runner()
    for seq_id, token_id in (1, 20), (2, 30):
        sampling = SamplingParams(temperature=0.0, logit_bias=((token_id, 100.0),))
        runner.open(make_state(seq_id, (5, 6), 2, sampling))
    first = runner.launch(plan_of(1, PlanEntry(1, 0, 2, 1)), CHANNEL)
    first.run_first()
    second = runner.launch(plan_of(2, PlanEntry(2, 0, 2, 1)), CHANNEL)
    assert first.collect().token_ids.rows() == [[20]]
    second.begin()
    assert second.collect().token_ids.rows() == [[30]]
