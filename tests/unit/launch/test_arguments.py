"""The flags of `python -m services.launch`."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.launch.arguments import parse_args


@pytest.mark.parametrize("name", ["1000", "2025-01-01", "true", '"quoted"'])
def test_a_model_directory_may_have_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    config, _ = parse_args(["--model", name, "--num-layers", "2"])
    assert (config.model.path, config.model.num_layers) == (Path(name), 2)
