"""Draws the pauses that `bench/recovery.py --json` has written: their distribution, and where the median one goes.

    python bench/plot_recovery.py out.png FILE.json [FILE.json ...]
    python bench/plot_recovery.py out.png FILE.json "with a host tier=OTHER.json"

Kills of one kind and setting are put together. A name before a file is added to those of its kinds.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.load.plots import STYLE, pyplot

Kinds = dict[str, dict[str, list[Any]]]


def read(arguments: list[str]) -> Kinds:
    """Gaps, in seconds, and timelines, seconds after the kill by phase, of all kills of a kind."""
    kinds: Kinds = {}
    for argument in arguments:
        name, _, file = argument.rpartition("=")
        for standbys, found in json.loads(Path(file).read_text()).items():
            for kind, figures in found.items():
                label = kind + f", {name}" * bool(name) + ", no standbys" * (standbys == "off")
                all_of_kind = kinds.setdefault(label, {"gaps_s": [], "timelines": []})
                for key, values in all_of_kind.items():
                    values += figures[key]
    return kinds


def draw(kinds: Kinds, path: Path) -> None:
    with pyplot.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), width_ratios=(1, 1.2), layout="constrained")
        for label, figures in kinds.items():
            gaps = sorted(figures["gaps_s"])
            shares = [100 * (index + 1) / len(gaps) for index in range(len(gaps))]
            left.step([0, *gaps], [0, *shares], where="post", label=f"{label} ({len(gaps)})")
        left.set(title="Longest gap in any stream", xlabel="seconds", ylabel="% of the kills", xlim=(0, None))
        left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
        phases = list(next(iter(kinds.values()))["timelines"][0])
        for row, figures in enumerate(kinds.values()):
            reached = [statistics.median(each[phase] for each in figures["timelines"]) for phase in phases]
            begins = [0.0, *reached[:-1]]
            for index, (begin, end) in enumerate(zip(begins, reached, strict=True)):
                name = phases[index] if row == 0 else None
                right.barh(row, max(0.0, end - begin), left=begin, color=f"C{index}", label=name)
        right.set(title="Until each phase is reached, median", xlabel="seconds after the kill")
        right.set_yticks(range(len(kinds)), kinds)
        right.invert_yaxis()
        right.legend(loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(path)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    draw(read(sys.argv[2:]), Path(sys.argv[1]))
