"""`python -m tests.chaos --seeds N`: the long chaos run. Prints one line per seed; ends at the first failure."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.chaos import LONG, POLICIES, SHORT, arena, run

RUNS_PER_CLUSTER = 5


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="number of runs, %(default)s by default")
    parser.add_argument("--first-seed", type=int, default=1, metavar="S", help="of the first run; the next adds 1")
    parser.add_argument("--short", action="store_true", help="runs of a third of the streams and actions")
    parser.add_argument("--speculation", choices=[*POLICIES], help="of all runs; by default, they take turns")
    tier = "runs with a host tier, whose bytes change, too; in most, sequences take turns"
    parser.add_argument("--host-tier", action="store_true", help=tier)
    parser.add_argument("--lanes", action="store_true", help="runs with two lanes, without speculation")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that everything is closed
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for cluster_number in sorted({seed // RUNS_PER_CLUSTER for seed in seeds}):
        speculation = arguments.speculation or [*POLICIES][cluster_number % len(POLICIES)]
        if arguments.lanes:
            speculation = "off"
        has_standbys = cluster_number % 2 == 0
        directory = Path(tempfile.mkdtemp(prefix="chaos-"))
        seed = None
        try:
            size = SHORT if arguments.short else LONG
            options = {"has_standbys": has_standbys, "has_tier": arguments.host_tier}
            options["takes_turns"] = arguments.host_tier and cluster_number % 3 < 2
            with arena(directory, speculation, size, **options, num_lanes=1 + arguments.lanes) as where:
                for seed in (seed for seed in seeds if seed // RUNS_PER_CLUSTER == cluster_number):
                    start = time.monotonic()
                    actions = run(where, seed)
                    duration_s = time.monotonic() - start
                    name = f"seed {seed}, {speculation}, with{'' if has_standbys else 'out'} standbys"
                    print(f"{name}: {', '.join(actions)}: {duration_s:.1f} s", flush=True)
        except Exception:
            traceback.print_exc()
            print(f"FAILED: seed {seed}, {speculation}; again: python -m tests.chaos --first-seed {seed} --seeds 1 "
                  f"--speculation {speculation}{' --short' * arguments.short}{' --host-tier' * arguments.host_tier}"
                  f"{' --lanes' * arguments.lanes}\n"
                  f"logs: {directory}", file=sys.stderr)
            return 1
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
