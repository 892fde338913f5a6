"""`bench/steps.py`: plain sequences decode in it, and no part of a step is left out."""

from __future__ import annotations

from bench.steps import PARTS, TOKEN, FormedSteps, Steps


def test_every_sequence_gets_a_token_in_each_step_when_the_prompts_are_computed() -> None:
    steps = Steps(2, 1, counts_calls=True)
    assert any(steps.run_step() for _ in range(10)), "the prompts take a few"
    sequences = steps.session.running
    before = [len(each.output_token_ids) for each in sequences]
    assert steps.run_step()
    assert [len(each.output_token_ids) for each in sequences] == [num + 1 for num in before]
    assert {token_id for each in sequences for token_id in each.output_token_ids} == {TOKEN}
    assert all(steps.times[part][-1] > 0 for part in PARTS)


def test_with_forms_the_masks_and_the_tokens_that_they_allow_are_measured_too() -> None:
    steps = FormedSteps(2, 1, counts_calls=True)
    assert any(steps.run_step() for _ in range(10))
    assert all(steps.run_step() for _ in range(30))
    assert all(steps.times[part][-1] > 0 for part in PARTS)
    for sequence, matcher in zip(steps.session.running, steps.matchers, strict=True):
        assert len(sequence.output_token_ids) >= 30 and matcher.is_running, "all have been allowed"
    steps.grammars.close()
