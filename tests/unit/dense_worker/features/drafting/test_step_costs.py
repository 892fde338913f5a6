"""What steps cost is measured; where all become slower, those not measured lately do so, too."""

from __future__ import annotations

import pytest

from services.dense_worker.features.drafting.step_costs import MIN_STEPS, VALID_STEPS, WINDOW, StepCosts


def make_costs() -> StepCosts:
    """Steps of one token cost 1 s if they are planned ahead, others 1.5 s."""
    costs = StepCosts(8, 64)
    for _ in range(WINDOW):
        costs.record(1, 1.0, is_ahead=True)
    for _ in range(MIN_STEPS):
        costs.record(1, 1.5, is_ahead=False)
    return costs


def test_a_pause_does_not_change_the_cost() -> None:
    costs = make_costs()
    costs.record(1, 80.0, is_ahead=True)
    assert costs.cost(1, is_ahead=True) == 1.0
    assert costs.cost(1, is_ahead=False) == pytest.approx(1.5)
    assert costs.cost(8, is_ahead=False) is None


def test_costs_rise_and_fall_together() -> None:
    costs = make_costs()
    for pace in (4.0, 1.0, 0.5):
        for _ in range(WINDOW):
            costs.record(1, pace, is_ahead=True)
        late_s = costs.cost(1, is_ahead=False)
        assert late_s is not None and late_s / pace == pytest.approx(1.5, rel=0.05)


def test_a_cost_measured_on_a_busy_machine_holds_for_a_quiet_one() -> None:
    costs = make_costs()
    for pace in (4.0, 1.0):
        for _ in range(WINDOW):
            costs.record(2, pace * 2.0, is_ahead=True)
            costs.record(1, pace, is_ahead=True)
        if pace == 4.0:
            for _ in range(MIN_STEPS):
                costs.record(2, 4.0 * 3.0, is_ahead=False)
    assert costs.cost(2, is_ahead=False) == pytest.approx(3.0, rel=0.05)


def test_an_old_cost_is_unknown() -> None:
    costs = make_costs()
    for _ in range(VALID_STEPS[False]):
        costs.record(1, 1.0, is_ahead=True)
    assert costs.cost(1, is_ahead=False) is None and costs.cost(1, is_ahead=True) == 1.0
