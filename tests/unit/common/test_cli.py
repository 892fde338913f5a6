"""Command lines, with dashes or underscores in the names of flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.child_options import ChildOptions
from services.common.cli import dashed, parse_service_args


def test_later_settings_win_over_earlier_ones_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[gateway]\naddress = "127.0.0.1:1000"\n[scheduler]\nmax_num_seqs = 8\n')
    arguments = ["--config", str(file), "--set", "scheduler.max_num_seqs=4", "--set=scheduler.max_num_seqs=2"]
    config, options = parse_service_args("prog", arguments)
    assert config.gateway.address == "127.0.0.1:1000"
    assert config.scheduler.max_num_seqs == 2
    assert options == ChildOptions(), "only a launcher passes such options"


def test_underscores_in_flags_become_dashes_but_values_stay() -> None:
    assert dashed(["--max_tokens", "a_b", "--stop_x=c_d", "-a_b", "e_f", "--", "--set", "x.y_z=1"]) == [
        "--max-tokens",
        "a_b",
        "--stop-x=c_d",
        "-a_b",
        "e_f",
        "--",
        "--set",
        "x.y_z=1",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "gateway.colour=red"], "prog: unknown config key gateway.colour"),
        (["--set", "gateway"], "section.key=value"),
        (["--config", "/nonexistent.toml"], "/nonexistent.toml"),
    ],
)
def test_a_wrong_config_is_one_line_and_status_1(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_service_args("prog", arguments)
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
