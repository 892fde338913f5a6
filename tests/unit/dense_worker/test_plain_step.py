"""A step of plain sequences runs the files of both workers that its page lists, and no others."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from services.common.config import Config
from services.common.sampling_params import SamplingParams
from tests.support.cluster import REPOSITORY
from tests.support.dense.sequences import new_sequence
from tests.support.documents import LIFE_OF_A_TOKEN
from tests.support.lane_pair import LanePair, lane_pair

SECTION = r"^## A plain step\n(.*?)^## "
SERVICES = f"{REPOSITORY / 'services'}/"
# The pair of engines has no link for plans, no observers, and nothing that may draft.
NOT_IN_A_PAIR = {
    "dense_worker/engine/attention_client.py",
    "dense_worker/metrics.py",
    "dense_worker/features/drafting/measured_drafting.py",
}
ONLY_IN_A_PAIR = {"dense_worker/features/drafting/drafting.py"}
NUM_STREAMS, NUM_STEPS = 4, 3
NUM_RUNS = 4  # what runs in only some of them belongs to a block that is full, or to a timer


class Watched:
    """The files, from `services/`, in which a function runs while this is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.files = set[str]()

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(SERVICES):
            self.files.add(frame.f_code.co_filename.removeprefix(SERVICES))

    def files_of_steps(self, pair: LanePair) -> set[str]:
        """Those of both workers in some steps of plain sequences."""
        self.files, self.is_on = set(), True
        for _ in range(NUM_STEPS):
            assert len(pair.next_report().outputs.decoded.token_ids) == NUM_STREAMS
        self.is_on = False
        return {each for each in self.files if each.startswith(("dense_worker/", "attn_worker/"))}


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Of threads that start within the test, as both engines do."""
    watched = Watched()
    threading.setprofile(watched.note)
    yield watched
    threading.setprofile(None)


def test_a_plain_step_runs_the_files_that_its_page_lists_and_no_others(watched: Watched) -> None:
    section = re.search(SECTION, LIFE_OF_A_TOKEN.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    table = "".join(re.findall(r"^\|.*", section[1], re.MULTILINE))
    listed = set(re.findall(r"`((?:dense|attn)_worker/[\w/]+\.py)", table)) - NOT_IN_A_PAIR
    with lane_pair(Config()) as pair:
        for seq_id in range(1, NUM_STREAMS + 1):
            sampling = SamplingParams(temperature=0)
            pair.engine.submit(new_sequence(seq_id, f"r{seq_id}", [5, 6, 7, 8, 9], sampling, max_tokens=200))
        while len(pair.next_report().outputs.decoded.token_ids) < NUM_STREAMS:
            pass
        found = set.intersection(*[watched.files_of_steps(pair) for _ in range(NUM_RUNS)]) - ONLY_IN_A_PAIR
    assert not found - listed, "a plain step runs them: list them, or keep it away from what it does not need"
    assert not listed - found, "no plain step runs them"
