"""The short chaos run; `make chaos` has the long one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.chaos import SHORT, arena, run

SEED = 1


@pytest.mark.timeout(400)  # it takes about 20 s on a quiet machine
@pytest.mark.parametrize(
    ("speculation", "options"),
    [("suffix", {"has_standbys": True}), ("draft_model", {}), ("off", {"has_tier": True, "takes_turns": True})],
)
def test_streams_survive_a_monkey_and_nothing_of_the_run_is_left(
    speculation: str, options: dict[str, bool], tmp_path: Path
) -> None:
    size = replace(SHORT, num_layers=2, max_tokens=50)
    with arena(tmp_path, speculation, size, is_warm=True, **{"has_standbys": False} | options) as where:
        try:
            actions = run(where, SEED)
        except AssertionError as error:
            raise AssertionError(f"seed {SEED}: {error}\n{where.cluster.log_file.read_text()[-4000:]}") from error
    assert actions
