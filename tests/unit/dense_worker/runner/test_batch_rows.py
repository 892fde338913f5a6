"""Steps of many sequences at once have the inputs and tokens that each sequence has for itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dense_worker.runner.model_runner import LayerRun, ModelRunner
from services.dense_worker.runner.step_input import BoundPlan
from services.dense_worker.runner.step_tokens import PendingTokens
from services.step import PlanEntry
from tests.support.examples import examples
from tests.support.plans import plan_of
from tests.unit.dense_worker.runner.test_runner_sequences import CHANNEL, NUM_LAYERS, make_runner, new

NUM_SLOTS = 6


@dataclass
class Text:
    """A sequence as a list: after token t comes t + 1."""

    token_ids: list[int]
    num_computed: int = 0
    num_planned: int = 0  # sampled tokens of steps that have not been read
    is_open: bool = True
    sampled: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.token_ids) + self.num_planned


class Run:
    """A runner whose steps are prepared one ahead, as on a GPU, or when they run, as on a CPU."""

    def __init__(self, data: st.DataObject, *, is_ahead: bool) -> None:
        self.data, self.is_ahead = data, is_ahead
        self.runner, self.backend = make_runner(NUM_SLOTS)
        self.texts: dict[int, Text] = {}
        self.pending: list[tuple[Any, list[tuple[Text, PlanEntry, list[int]]]]] = []

    def open(self, seq_id: int, prompt: list[int]) -> None:
        self.texts[seq_id] = Text(prompt)
        self.runner.open(new(seq_id, *prompt))

    def launch(self, step_id: int) -> None:
        """A step of some sequences, which may close others."""
        closed = [seq_id for seq_id in self.texts if self.draw(st.integers(0, 9)) == 0]
        for seq_id in closed:
            self.texts.pop(seq_id).is_open = False
        entries, rows = [], []
        for seq_id, text in self.texts.items():
            if self.draw(st.integers(0, 4)) == 0:
                continue
            entry = self.draw_entry(seq_id, text)
            entries.append(entry)
            expected = text.token_ids[entry.position :] + [-1] * text.num_planned
            rows.append((text, entry, [*expected[: entry.num_tokens - len(entry.draft_token_ids)]]))
            text.num_computed += entry.num_tokens - len(entry.draft_token_ids)
            text.num_planned += entry.num_logits > 0
        bound = self.runner.bind(plan_of(step_id, *entries, close_seq_ids=tuple(closed)))
        self.pending.append((self.enqueue(bound) if self.is_ahead else bound, rows))

    def enqueue(self, bound: BoundPlan) -> tuple[list[int], PendingTokens | None]:
        """Does the work of a GPU: the tokens that a step has sampled are not read before the next one is prepared."""
        step = self.runner.prepare(bound)
        if not len(bound.plan.entries):
            return [], None
        token_ids = torch.from_numpy(step.token_ids)
        token_ids[step.fed_rows] = self.runner._sampler.last_token[step.fed_slots]
        layers = LayerRun(self.backend, CHANNEL, NUM_LAYERS)
        layers.begin(token_ids)
        logits, residual = layers.finish(torch.from_numpy(step.sampled_rows))
        host_token_ids = torch.empty(len(step.sampled_rows), dtype=torch.int64)
        return token_ids.tolist(), self.runner.finish(step, logits, residual, CHANNEL, host_token_ids)

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self.data.draw(strategy)

    def draw_entry(self, seq_id: int, text: Text) -> PlanEntry:
        num_left = text.length - text.num_computed
        num_tokens = num_left if num_left == 1 else self.draw(st.integers(1, num_left))
        if num_tokens < num_left:
            return PlanEntry(seq_id, text.num_computed, num_tokens, 0)
        drafts: tuple[int, ...] = ()
        if not text.num_planned and self.draw(st.booleans()):
            last = text.token_ids[-1]
            drafts = tuple(self.draw(st.lists(st.sampled_from([last + 1, last + 2, last + 3]), max_size=3)))
        return PlanEntry(seq_id, text.num_computed, num_tokens + len(drafts), 1 + len(drafts), drafts)

    def collect(self) -> None:
        """Runs the oldest step and compares it with the lists."""
        step, rows = self.pending.pop(0)
        token_ids, pending = step if self.is_ahead else self.enqueue(step)
        if pending is None:
            return
        result, fed = pending.read(), iter(token_ids)
        for (text, entry, expected), sampled in zip(rows, result.token_ids.rows(), strict=True):
            tokens = [next(fed) for _ in range(entry.num_tokens)]
            known = [text.token_ids[entry.position + i] if each < 0 else each for i, each in enumerate(expected)]
            assert tokens == known + list(entry.draft_token_ids)
            accepted: list[int] = []
            if entry.num_logits:
                accepted = [tokens[-1 - len(entry.draft_token_ids)] + 1]
                for draft in entry.draft_token_ids:
                    if draft != accepted[-1]:
                        break
                    accepted.append(draft + 1)
            assert sampled == accepted
            text.token_ids += accepted
            text.num_planned -= entry.num_logits > 0
            text.num_computed += max(0, len(accepted) - 1)
            text.sampled += accepted


@settings(max_examples=examples(60), deadline=None)
@given(st.data(), st.booleans())
def test_steps_are_those_of_each_sequence_for_itself(data: st.DataObject, is_ahead: bool) -> None:
    run = Run(data, is_ahead=is_ahead)
    next_id = 1
    for step_id in range(1, data.draw(st.integers(4, 16))):
        while len(run.texts) < NUM_SLOTS - 3 and data.draw(st.booleans()):
            run.open(next_id, data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5)))
            next_id += 1
        if any(entry.draft_token_ids for _, rows in run.pending for _, entry, _ in rows):
            run.collect()  # a step after one with drafts needs its result
        run.launch(step_id)
        if len(run.pending) > 1:
            run.collect()
    while run.pending:
        run.collect()
    runner: ModelRunner = run.runner
    for seq_id, text in run.texts.items():
        assert runner._sequences[seq_id].token_ids == text.token_ids


def test_a_token_that_is_read_late_is_not_taken_for_one_of_the_slots_next_sequence() -> None:
    run: Any = Run(None, is_ahead=True)  # type: ignore[arg-type]
    run.runner, run.backend = make_runner(1)
    bind = run.runner.bind
    run.runner.open(new(1, 5, 6))
    _, first = run.enqueue(bind(plan_of(1, PlanEntry(1, 0, 2, 1))))
    run.runner.open(new(2, 30, 31))
    _, second = run.enqueue(bind(plan_of(2, PlanEntry(2, 0, 2, 1), close_seq_ids=(1,))))
    assert first.read().token_ids.rows() == [[7]]  # the slot is that of sequence 2 by now
    fed, third = run.enqueue(bind(plan_of(3, PlanEntry(2, 2, 1, 1))))
    assert fed == [32], "it is fed on the device, where the second step has left it"
    assert second.read().token_ids.rows() == [[32]]
    assert third.read().token_ids.rows() == [[33]]
    assert run.runner._sequences[2].token_ids == [30, 31, 32, 33]
