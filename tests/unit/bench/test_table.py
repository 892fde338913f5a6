"""The table of required figures: its loads are ones that its programs take, and its rows say what was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

from bench.gpu.models import FORMATS, SHAPES, Load
from bench.gpu.table import COMMON, GROUPS, Figure, format_row, value_at
from bench.load.stats import CoreFigures, ServingFigures, Summary
from bench.serving import make_parser
from services.common.config import load_config


def test_every_group_can_be_served_and_sent_its_loads(tmp_path: Path) -> None:
    parser = make_parser("bench/serving.py")
    names = {*ServingFigures.__dataclass_fields__, *CoreFigures.__dataclass_fields__}
    for group in GROUPS.values():
        assert group.shape in SHAPES
        settings = load_config(None, [*COMMON, *group.settings, *FORMATS[group.number_format]])
        for row in group.rows:
            if isinstance(row.load, Load):
                longest = row.load.input_tokens + row.load.output_tokens
                assert row.load.concurrency <= settings.scheduler.max_num_seqs
                assert longest <= SHAPES[group.shape]["max_position_embeddings"]
            else:
                assert row.load[0] == "--num-prompts", "`--part` changes the second option"
                parser.parse_args(list(row.load))
            for figure in row.figures:
                name, *of_summary = figure.path.split(".")
                assert name in names and set(of_summary) <= Summary.__dataclass_fields__.keys()


def test_a_row_shows_median_range_and_what_is_required() -> None:
    figure = Figure("one stream, TPOT ms", "tpot_ms.mean", 3.7, 3.5)
    assert format_row("7b", figure, [3.9, 3.8, 3.84]) == "| 7b: one stream, TPOT ms | 3.84 (3.8 to 3.9) | 3.7 | 3.5 |"
    assert format_row("load", Figure("tok/s", "output_throughput"), [12345.6]) == "| load: tok/s | 12,346 | – | – |"


def test_a_figure_without_a_value_is_not_a_number() -> None:
    figures = json.loads('{"tpot_ms": {"mean": 3.5}, "ttft_ms": null}')
    assert value_at(figures, "tpot_ms.mean") == 3.5
    assert math.isnan(value_at(figures, "ttft_ms.mean"))
