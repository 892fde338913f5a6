"""`python -m tests.chaos.forms --answers N`: every form beside every option, with all sources of drafts and with kills.

Prints a line for each source. Ends with 1 if an answer was not valid, or not that of a server without drafts.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

from tests.chaos.forms.answers import Answer
from tests.chaos.forms.cases import Case, every_case
from tests.chaos.forms.matrix import (
    SPECULATION,
    UNDRAFTED,
    Count,
    Killer,
    answer_all,
    answer_whole,
    check_beams,
    judge,
    num_steps_with_drafts,
    server,
)
from tests.chaos.forms.thinking_model import make_thinking_model

Answers = Sequence[Sequence[Answer]]  # of each case
MAX_SHOWN = 5  # mistakes of a kind


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos.forms", description=__doc__)
    parser.add_argument("--answers", type=int, default=10_000, metavar="N", help="at least; %(default)s by default")
    parser.add_argument("--seed", type=int, default=1, help="of the first round of all cases; the next adds 1")
    parser.add_argument("--speculation", nargs="+", choices=SPECULATION, default=SPECULATION, help="default: all")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that everything is closed
    cases, seed = list[Case](), arguments.seed
    while sum(case.message.n for case in cases) * len(arguments.speculation) < arguments.answers:
        cases += every_case(seed)
        seed += 1
    directory = Path(tempfile.mkdtemp(prefix="forms-"))
    model = make_thinking_model(directory / "model")
    is_wrong, total, start = False, 0, time.monotonic()
    with server(_own(directory, UNDRAFTED), model, UNDRAFTED) as services:
        expected, whole = answer_all(services, cases), answer_whole(services, cases)
    print(f"{UNDRAFTED}: {_judge(cases, expected, expected, whole, 0)} in {time.monotonic() - start:.0f} s", flush=True)
    for speculation in arguments.speculation:
        start = time.monotonic()
        own = _own(directory, speculation)
        with server(own, model, speculation) as services:
            if error := check_beams(services):
                print(f"{speculation}: beams: {error}", file=sys.stderr)
                is_wrong = True
            killer = Killer(services, Random(arguments.seed))
            try:
                found = answer_all(services, cases)
            finally:
                killer.close()
            services.wait_idle()
        count = _judge(cases, found, expected, whole, killer.num_kills)
        num_drafted = num_steps_with_drafts(own)
        took_s = time.monotonic() - start
        print(f"{speculation}: {count}, {num_drafted} steps with drafts, in {took_s:.0f} s", flush=True)
        is_wrong |= not num_drafted
        is_wrong |= count.is_wrong
        total += count.num_answers
    print(f"{total} answers")
    if is_wrong:
        print(f"FAILED: the seed was {arguments.seed}; logs: {directory}", file=sys.stderr)
        return 1
    shutil.rmtree(directory)
    return 0


def _own(directory: Path, name: str) -> Path:
    own = directory / name
    own.mkdir()
    return own


def _judge(
    cases: Sequence[Case],
    found: Answers,
    expected: Answers,
    whole: Mapping[int, Sequence[Answer]],
    num_kills: int,
) -> Count:
    count = Count(num_kills=num_kills)
    judge(cases, found, expected, whole, count)
    for name, mistakes in (("INVALID", count.invalid), ("DIFFERENT", count.different)):
        for mistake in mistakes[:MAX_SHOWN]:
            print(f"{name} {mistake}", file=sys.stderr, flush=True)
    return count


if __name__ == "__main__":
    sys.exit(main())
