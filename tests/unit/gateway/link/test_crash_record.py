"""Which request fails when workers die: none after one crash, at most one after several."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.beams.options import BeamSearchOptions
from services.common.errors import RequestAborted
from services.gateway.link.crash_record import CrashRecord
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import JournalEntry
from services.pb import dense_pb2
from tests.support.clients.generation_requests import make_request, open_entry


class Story:
    """Simulates the streams of a gateway, event by event. After every `crash` a worker with a new epoch connects."""

    def __init__(self, num_requests: int, **options: object) -> None:
        journal = Journal()
        self.entries = [open_entry(journal, make_request(f"r{i}", **options)) for i in range(num_requests)]
        sequences = journal.new_stream()
        for entry in self.entries:
            sequences.add(entry)
        self.record = CrashRecord(sequences)
        self.epoch = 1
        self.record.record_connected(self.epoch)

    def admit(self, *entries: JournalEntry) -> None:
        self.record.record_admitted([entry.seq_id for entry in entries])

    def crash(self) -> None:
        self.epoch += 1
        self.record.record_connected(self.epoch)

    def attention_crash(self, running: Mapping[JournalEntry, range]) -> None:
        """The attention worker dies; the dense worker lives, and reports what it was computing."""
        spans = [
            dense_pb2.SequenceSpan(seq_id=entry.seq_id, start=span.start, end=span.stop)
            for entry, span in running.items()
        ]
        self.record.record_farewell(dense_pb2.Farewell(is_crash=True, running=spans))
        self.record.record_connected(self.epoch)

    @property
    def failed(self) -> list[int]:
        return [index for index, entry in enumerate(self.entries) if entry.error is not None]


def test_one_crash_fails_no_request() -> None:
    story = Story(3)
    story.admit(*story.entries)
    story.crash()
    assert story.failed == []
    assert [entry.num_crashes for entry in story.entries] == [1, 1, 1]


def test_a_request_alone_in_two_consecutive_crashes_fails() -> None:
    story = Story(1)
    for _ in range(2):
        story.admit(*story.entries)
        story.crash()
    assert story.failed == [0]
    error = story.entries[0].error
    assert isinstance(error, RequestAborted)
    assert "'r0'" in str(error) and "2 crashes" in str(error)


def test_a_request_that_only_happens_to_run_first_after_a_crash_does_not_fail() -> None:
    """The next worker dies before it has admitted the others. It was not alone in the first crash."""
    story = Story(3)
    story.admit(*story.entries)
    story.crash()
    story.admit(story.entries[0])
    story.crash()
    assert story.failed == []
    story.admit(story.entries[0])  # a suspect now
    story.crash()
    assert story.failed == [0]


def test_a_request_beside_those_of_other_gateways_is_not_alone() -> None:
    """The dense worker reports what it was computing for all of them."""
    (story, other), spans = (Story(1), Story(1)), {}
    other.entries[0].seq_id = 1 << 40  # as of another gateway
    for each in (story, other):
        spans[each.entries[0]] = range(4)
    for _ in range(2):
        story.admit(*story.entries)
        story.attention_crash(spans)
    assert story.failed == []
    story.admit(*story.entries)
    story.attention_crash({story.entries[0]: range(4)})  # a suspect now
    assert story.failed == [0]


def test_a_token_between_crashes_clears_a_sequence() -> None:
    story = Story(1)
    for _ in range(20):
        story.admit(*story.entries)
        story.crash()
        story.admit(*story.entries)
        story.entries[0].append(5, 0.0)
    assert story.failed == []


def test_a_step_of_a_beam_search_between_crashes_clears_it() -> None:
    story = Story(2, beam_search=BeamSearchOptions(2, 2))
    searching, stuck = story.entries
    for number in range(3):
        story.admit(searching, stuck)
        step = dense_pb2.BeamStep(parents=[0, number and 1], token_ids=[5, 6], scores=[-1.0, -2.0])
        searching.add_search_step(step)
        story.crash()
    assert [entry.num_crashes for entry in story.entries] == [1, 3]
    assert story.failed == [1]


@pytest.mark.parametrize("culprit", range(5))
def test_of_many_requests_in_two_crashes_only_the_one_alone_in_the_third_fails(culprit: int) -> None:
    story = Story(5)
    for _ in range(2):
        story.admit(*story.entries)
        story.crash()
    assert story.failed == []
    assert all(entry.num_crashes == 2 for entry in story.entries), "the dense worker runs these one at a time"
    for entry in story.entries:  # one at a time, like the dense worker
        story.admit(entry)
        if entry is story.entries[culprit]:
            story.crash()
            break
        entry.append(5, 0.0)
    assert story.failed == [culprit]


def test_requests_in_the_queue_do_not_count() -> None:
    story = Story(3)
    for _ in range(5):
        story.admit(story.entries[0])
        story.crash()
    assert story.failed == [0]
    assert [entry.num_crashes for entry in story.entries[1:]] == [0, 0]


@pytest.mark.parametrize("num_breaks", [2, 5])
def test_a_broken_connection_to_a_living_worker_does_not_count(num_breaks: int) -> None:
    story = Story(1)
    for _ in range(num_breaks):
        story.admit(*story.entries)
        story.record.record_connected(story.epoch)
    assert story.entries[0].num_crashes == 0


def test_an_announced_end_does_not_count_even_if_another_worker_follows() -> None:
    story = Story(1)
    for _ in range(5):
        story.admit(*story.entries)
        story.record.record_farewell(dense_pb2.Farewell(is_crash=False))
        story.crash()
    assert story.failed == []


def test_a_crash_of_the_attention_worker_counts_though_the_dense_worker_lives() -> None:
    story = Story(1)
    for _ in range(2):
        story.admit(*story.entries)
        story.attention_crash({story.entries[0]: range(100)})
    assert story.failed == [0]


def test_a_crash_does_not_count_for_sequences_outside_the_running_step() -> None:
    story = Story(2)
    for _ in range(5):
        story.admit(*story.entries)
        story.attention_crash({})
    assert [entry.num_crashes for entry in story.entries] == [0, 0]
    for _ in range(3):
        story.admit(*story.entries)
        story.attention_crash({story.entries[0]: range(100)})
    assert story.failed == [0] and story.entries[1].num_crashes == 0


def test_a_crash_in_text_before_the_previous_crash_does_not_count() -> None:
    """A long request runs alone. After the first crash its text is computed again; the next crashes happen then."""
    story = Story(1)
    [entry] = story.entries
    story.admit(entry)
    story.attention_crash({entry: range(900, 902)})
    for start in (0, 128, 772):
        story.admit(entry)
        story.attention_crash({entry: range(start, start + 128)})
    assert story.failed == [] and entry.num_crashes == 1
    story.admit(entry)
    story.attention_crash({entry: range(800, 901)})
    assert story.failed == [0]


@given(
    poison=st.integers(0, 999),
    starts=st.lists(st.integers(0, 999), min_size=2, max_size=2),
    ends=st.lists(st.integers(1, 1000), min_size=2, max_size=2),
)
def test_a_deadly_token_is_found_in_steps_of_any_size(poison: int, starts: list[int], ends: list[int]) -> None:
    story = Story(1)
    [entry] = story.entries
    for start, end in zip(starts, ends, strict=True):
        story.admit(entry)
        story.attention_crash({entry: range(min(start, poison), max(end, poison + 1))})
    assert story.failed == [0]


def test_no_request_fails_while_others_may_have_been_about_to_run() -> None:
    story = Story(3)
    for _ in range(2):
        story.admit(*story.entries)
        story.attention_crash({story.entries[0]: range(100)})
    assert story.failed == [], "the others may have been about to run"
    assert [entry.num_crashes for entry in story.entries] == [2, 0, 0]
