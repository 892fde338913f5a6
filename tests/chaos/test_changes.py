"""A short run of changes under kills; `make chaos` has the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.changes import SHORT, arena, run

SEED = 3  # other weights come while a worker is killed


@pytest.mark.timeout(400)  # it takes about 20 s on a quiet machine
def test_adapters_conversations_caches_and_weights_change_under_kills(tmp_path: Path) -> None:
    with arena(tmp_path, SHORT, has_standbys=False, is_warm=True) as where:
        try:
            run(where, SEED)
        except AssertionError as error:
            raise AssertionError(f"seed {SEED}: {error}\n{where.cluster.log_file.read_text()[-4000:]}") from error
