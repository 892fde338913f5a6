"""On a GPU a step runs before the tokens that its grammars need are known: then its sampling is enqueued later.

CUDA is replaced: what is enqueued runs at once, so that a step that is sampled too early shows other tokens.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from services.common.sampling_params import SamplingParams
from services.common.structured_output import Constraint, StructuredOutput
from services.dense_worker.features.drafting.drafter import Acceptance, ForcedTokens
from services.dense_worker.features.grammar.grammar_feature import GrammarFeature
from services.dense_worker.runner import cuda_model_runner
from services.dense_worker.runner.cuda_model_runner import CudaModelRunner
from services.dense_worker.runner.model_runner import ModelRunner, RunningStep
from services.dense_worker.sampling.editors import EDITORS
from services.dense_worker.sampling.sampler import Sampler
from services.grammar import matcher as matcher_module
from services.grammar.matcher import GrammarMatcher
from services.step import PlanEntry, StepPlan, StepResult
from tests.support.dense.forms import Forms, make_vocabulary
from tests.support.dense.sequences import make_state, with_grammar
from tests.support.dense.without_cuda import EagerGraphs, FakeChannel, TorchWithoutCuda
from tests.support.plans import plan_of

VOCAB_SIZE, MAX_NUM_SEQS, NUM_STEPS = 300, 4, 12
FORM = StructuredOutput(Constraint.REGEX, "(ab|cd){5}e?")

CHANNEL: Any = FakeChannel()
FEATURE = GrammarFeature(Mock())


def make_sampler() -> Sampler:
    return Sampler(MAX_NUM_SEQS, VOCAB_SIZE, "cpu", (*EDITORS, *FEATURE.editors))


class RandomLogits:
    """A `DenseBackend` of one layer. The logits depend on the last token alone."""

    always_ends = False
    table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def begin_step(self, plan: StepPlan, num_tokens: int, num_sampled: int = 0, embeds: object = None) -> None: ...

    def first(self, token_ids: torch.Tensor, qkv: torch.Tensor, input_embeds: object = None) -> torch.Tensor:
        return token_ids[:, None]

    def last(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden_out: object = None
    ) -> torch.Tensor:
        return self.table[residual[rows, 0]]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(make_vocabulary(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def cuda_runner(monkeypatch: pytest.MonkeyPatch) -> CudaModelRunner:
    monkeypatch.setattr(cuda_model_runner, "torch", TorchWithoutCuda())
    monkeypatch.setattr(cuda_model_runner, "StepGraphs", EagerGraphs)
    config: Any = SimpleNamespace(num_layers=1, vocab_size=VOCAB_SIZE, qkv_size=1, attn_size=1, num_middle_kinds=1)
    backend: Any = RandomLogits()
    arguments = (backend, make_sampler(), config, torch.float32, MAX_NUM_SEQS, 32)
    return CudaModelRunner(*arguments, captures_lazily=True, features=[FEATURE])


def plain_runner() -> ModelRunner:
    backend: Any = RandomLogits()
    return ModelRunner(backend, make_sampler(), 1, MAX_NUM_SEQS, [FEATURE])


def start(runner: ModelRunner, forms: Forms, forms_of: dict[int, StructuredOutput | None]) -> None:
    runner.attach([CHANNEL])
    for seq_id, form in forms_of.items():
        features = () if form is None else (with_grammar(forms.matcher(form)),)
        params = SamplingParams(seed=seq_id, structured_output=form)
        runner.open(make_state(seq_id, (5, 6), 2, params, features=features))


def plans(seq_ids: list[int]) -> list[StepPlan]:
    """Prompts of two tokens, then one token per step."""
    first = plan_of(1, *(PlanEntry(seq_id, 0, 2, 1) for seq_id in seq_ids))
    later = [
        plan_of(step, *(PlanEntry(seq_id, step, 1, 1) for seq_id in seq_ids)) for step in range(2, NUM_STEPS + 1)
    ]
    return [first, *later]


def run_ahead(runner: ModelRunner, steps: list[StepPlan]) -> list[StepResult]:
    """As the engine does: each step is launched before the one before is collected."""
    results: list[StepResult] = []
    running: RunningStep | None = None
    for plan in [*steps, None]:
        launched = None if plan is None else runner.launch(plan, CHANNEL)
        if running is not None:
            running.sample(waits=True)
            assert running.is_done()
            results.append(running.collect())
        running = launched
    return results


@pytest.mark.parametrize(
    "forms_of",
    [{1: FORM}, {1: FORM, 2: None, 3: FORM, 4: None}, {1: None, 2: None}],
    ids=["with a form", "mixed", "without"],
)
@pytest.mark.parametrize("ahead_s", [-1.0, 60.0], ids=["masks ahead", "masks when they are needed"])
def test_tokens_are_those_of_steps_one_after_the_other(
    cuda_runner: CudaModelRunner,
    forms: Forms,
    forms_of: dict[int, StructuredOutput | None],
    ahead_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matcher_module, "AHEAD_S", ahead_s)
    start(cuda_runner, forms, forms_of)
    found = run_ahead(cuda_runner, plans(list(forms_of)))
    expected_runner = plain_runner()
    start(expected_runner, forms, forms_of)
    expected = [expected_runner.launch(plan, CHANNEL).collect() for plan in plans(list(forms_of))]
    for i, (seq_id, form) in enumerate(forms_of.items()):
        tokens, others = ([token_id for result in results for token_id in result.token_ids.rows()[i]]
                          for results in (found, expected))  # fmt: skip
        if form is not None:
            end = next(step for step, result in enumerate(expected, 1) if seq_id in result.ended)
            tokens, others = tokens[:end], others[:end]  # steps after the end of a form have no meaning
            assert found[end - 1].ended[seq_id] is None
            assert forms.accepts(form, forms.text(tokens))
        assert tokens == others


LONG = StructuredOutput(Constraint.REGEX, "(begin|before) the (middle|muddle)( of the form){2}")


@pytest.mark.parametrize("is_cuda", [False, True])
@pytest.mark.parametrize("options", [{"seed": 7}, {"temperature": 0.0}, {"seed": 8, "logit_bias": ((40, -50.0),)}])
def test_drafts_that_a_form_forces_are_accepted_and_change_no_token(
    cuda_runner: CudaModelRunner, forms: Forms, options: Any, is_cuda: bool
) -> None:
    def output(runner: ModelRunner, num_drafts: int) -> tuple[list[int], int]:
        """The output of a sequence, and the number of steps. Each step is planned after the one before."""
        runner.attach([CHANNEL])
        grammar, token_ids, position, num_steps = forms.matcher(LONG), [5, 6], 0, 0
        params = SamplingParams(**options, structured_output=LONG)
        runner.open(make_state(1, (5, 6), 2, params, features=[with_grammar(grammar)]))
        while not grammar.is_complete:
            num_steps += 1
            drafts = tuple(ForcedTokens(with_grammar(grammar), Acceptance()).draft(num_drafts))
            num_tokens = len(token_ids) - position + len(drafts)
            plan = plan_of(num_steps, PlanEntry(1, position, num_tokens, 1 + len(drafts), drafts))
            [accepted] = runner.launch(plan, CHANNEL).collect().token_ids.rows()
            assert tuple(accepted[:-1]) == drafts, "a forced draft is always accepted"
            token_ids += accepted
            position = len(token_ids) - 1
        return token_ids[2:], num_steps

    expected, num_steps = output(plain_runner(), 0)
    assert forms.accepts(LONG, forms.text(expected))
    found, num_fewer = output(cuda_runner if is_cuda else plain_runner(), MAX_NUM_SEQS - 1)
    assert found == expected
    assert num_fewer < num_steps / 2


def test_a_step_waits_only_for_tokens_that_its_grammars_need(cuda_runner: CudaModelRunner, forms: Forms) -> None:
    start(cuda_runner, forms, {1: FORM, 2: None})
    first = plan_of(1, PlanEntry(1, 0, 2, 1), PlanEntry(2, 0, 1, 0))
    plain_rows = plan_of(2, PlanEntry(2, 1, 1, 1))
    formed_rows = plan_of(3, PlanEntry(1, 2, 1, 1), PlanEntry(2, 2, 1, 1))
    running = cuda_runner.launch(first, CHANNEL)
    assert running.is_done(), "all tokens of the prompt are known"
    ahead = cuda_runner.launch(plain_rows, CHANNEL)
    assert ahead.is_done(), "no grammar takes part"
    running.collect()
    late = cuda_runner.launch(formed_rows, CHANNEL)
    assert late.is_done(), "the grammar's last token has been collected"
    latest = cuda_runner.launch(plan_of(4, PlanEntry(1, 3, 1, 1)), CHANNEL)
    assert not latest.is_done()
    ahead.collect()
    late.collect()
    latest.sample(waits=True)
    assert latest.is_done()
    assert len(latest.collect().token_ids.rows()[0]) == 1


def test_a_new_attachment_forgets_the_step_that_waits(cuda_runner: CudaModelRunner, forms: Forms) -> None:
    start(cuda_runner, forms, {1: FORM})
    first, second = plans([1])[:2]
    cuda_runner.launch(first, CHANNEL)
    cuda_runner.launch(second, CHANNEL)
    start(cuda_runner, forms, {1: FORM})
    assert len(run_ahead(cuda_runner, plans([1]))) == NUM_STEPS


class Enqueued:
    """Records what the runner enqueues and asks of the host, in this order: layers, and masks of so many rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._events: list[str] = []
        first, fill_masks = RandomLogits.first, GrammarMatcher.fill_masks

        def run_layers(*arguments: Any) -> torch.Tensor:
            self._events.append("layers")
            return first(*arguments)

        def find_masks(matchers: Any, masks: Any) -> None:
            self._events.append(f"{len(matchers)} masks")
            fill_masks(matchers, masks)

        monkeypatch.setattr(RandomLogits, "first", run_layers)
        monkeypatch.setattr(GrammarMatcher, "fill_masks", find_masks)

    def take(self) -> list[str]:
        events, self._events = self._events, []
        return events


def test_masks_wait_for_the_next_plan_and_its_layers_wait_for_them(
    cuda_runner: CudaModelRunner, forms: Forms, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(cuda_runner, forms, {1: FORM, 2: None, 3: FORM, 4: FORM})
    enqueued = Enqueued(monkeypatch)
    first, second, third = plans([1, 2, 3, 4])[:3]
    running = cuda_runner.launch(first, CHANNEL)
    assert enqueued.take() == ["layers", "3 masks"], "the masks are found while the layers run"
    ahead = cuda_runner.launch(second, CHANNEL)
    assert enqueued.take() == ["layers"]
    running.collect()
    assert enqueued.take() == [], "tokens and the next plan go out before the host looks for masks"
    latest = cuda_runner.launch(third, CHANNEL)
    assert enqueued.take() == ["3 masks", "layers"], "on the device, a step begins with the tokens of the one before"
    ahead.collect()
    monkeypatch.setattr(GrammarMatcher, "has_found", False)
    latest.sample(waits=False)
    assert not latest.is_done() and enqueued.take() == [], "other threads still look for the masks"
    latest.sample(waits=True)
    assert latest.is_done() and enqueued.take() == ["3 masks"], "no further step is launched"
    latest.sample(waits=True)
    assert enqueued.take() == []


NOTHING: Any = None  # is enqueued after a step


def test_what_follows_a_step_comes_after_its_tokens(
    cuda_runner: CudaModelRunner, forms: Forms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_runner, "follow", lambda tokens, follow_up: tokens)
    start(cuda_runner, forms, {1: FORM})
    first, second = plans([1])[:2]
    running, ahead = cuda_runner.launch(first, CHANNEL), cuda_runner.launch(second, CHANNEL)
    running.collect()
    enqueued = Enqueued(monkeypatch)
    ahead.follow_with(NOTHING)
    assert enqueued.take() == ["1 masks"]
    assert len(ahead.collect().token_ids.rows()[0]) == 1


def test_a_plan_may_close_sequences_of_a_step_that_waits_for_its_masks(
    cuda_runner: CudaModelRunner, forms: Forms
) -> None:
    """Sequence 1 ends in step 2. By then step 3 has been launched with it. Step 4 closes it; then 3 gets its slot."""
    steps = [
        plan_of(1, PlanEntry(1, 0, 2, 1), PlanEntry(2, 0, 2, 1)),
        *(plan_of(step, PlanEntry(1, step, 1, 1), PlanEntry(2, step, 1, 1)) for step in (2, 3)),
        plan_of(4, PlanEntry(2, 4, 1, 1), close_seq_ids=(1,)),
        plan_of(5, PlanEntry(2, 5, 1, 1), PlanEntry(3, 0, 2, 1)),
        *(plan_of(step, PlanEntry(2, step, 1, 1), PlanEntry(3, step - 4, 1, 1)) for step in range(6, 11)),
    ]
    outputs: list[dict[int, list[int]]] = []
    for runner in (cuda_runner, plain_runner()):
        start(runner, forms, {1: StructuredOutput(Constraint.REGEX, "(a|b)c"), 2: FORM, 3: FORM})
        is_ahead = runner is cuda_runner
        results = run_ahead(runner, steps) if is_ahead else [runner.launch(each, CHANNEL).collect() for each in steps]
        assert results[1].ended == {1: None}
        output: dict[int, list[int]] = {1: [], 2: [], 3: []}
        for plan, result in zip(steps, results, strict=True):
            for entry, token_ids in zip(plan.entries, result.token_ids.rows(), strict=True):
                output[entry.seq_id] += token_ids
        outputs.append({**output, 1: output[1][:2]})  # what comes after the end of a form has no meaning
    assert outputs[0] == outputs[1]
    assert all(set(forms.text(outputs[0][seq_id])) <= set("abcde") for seq_id in (1, 2, 3))
