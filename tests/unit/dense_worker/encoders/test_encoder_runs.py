"""Encoders in the real scheduler: what is computed when, what is kept, and that nobody waits for ever."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import CapacityError
from services.dense_worker.encoders.encoder import Encoded
from services.dense_worker.encoders.encoder_runs import EncodedSequence, EncoderRuns
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.waiting_queue import WaitingQueue
from services.dense_worker.features.feature import Feature
from tests.support.dense.scheduler_cluster import Cluster, expected_output, make_sequence, new_attachment
from tests.support.examples import examples

ROW_BYTES = 8  # of an output: a row of two float32


@dataclass(frozen=True)
class Picture:
    hash: str
    num_rows: int


class EncodeNames:
    """An encoder that writes down what it computes, in so many parts; `lag`: of a GPU, see `Lagging`."""

    def __init__(self, num_parts: int, lag: int | None) -> None:
        self.runs: list[list[str]] = []
        self.last: Callable[[], NamesRun | None] = lambda: None  # run, as long as it is kept
        self.num_parts = 0  # that were computed
        self.error: Exception | None = None
        self._parts_of_run, self._lag = num_parts, lag

    def size(self, each: Picture) -> int:
        return each.num_rows

    def output_bytes(self, each: Picture) -> int:
        return each.num_rows * ROW_BYTES

    def begin(self, inputs: Iterable[Picture]) -> NamesRun:
        self.runs.append([each.hash for each in inputs])
        run = NamesRun(self, list(inputs), self._parts_of_run, self._lag)
        self.last = weakref.ref(run)
        return run


class NamesRun:
    def __init__(self, encoder: EncodeNames, inputs: list[Picture], num_parts: int, lag: int | None) -> None:
        self._encoder, self._inputs, self._left, self._lag = encoder, inputs, num_parts, lag

    def advance(self) -> list[Encoded] | None:
        if self._encoder.error is not None:
            raise self._encoder.error
        assert self._left > 0, "it has ended"
        self._encoder.num_parts += 1
        self._left -= 1
        if self._left:
            return None
        done: Any = None if self._lag is None else Lagging(self._lag)
        return [Encoded(torch.full((each.num_rows, 2), float(ord(each.hash))), done) for each in self._inputs]


class Lagging:
    """A GPU that has ended when it was asked so many times."""

    def __init__(self, lag: int) -> None:
        self._left = lag

    def query(self) -> bool:
        self._left -= 1
        return self._left < 0


class EncodedFeature(Feature):
    sequence_type = EncodedSequence

    def __init__(self, runs: EncoderRuns[Picture]) -> None:
        self.runs = runs

    def provide(self, waiting: WaitingQueue, oldest_step_id: int | None) -> Iterable[Sequence]:
        return self.runs.run(waiting, oldest_step_id)


class EncoderCluster(Cluster):
    def __init__(
        self, max_rows: int, max_rows_kept: int, num_parts: int = 1, lag: int | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.encoder = EncodeNames(num_parts, lag)
        self.runs = EncoderRuns("pictures", self.encoder, max_rows, max_rows_kept * ROW_BYTES, max_runs=2)
        self.runs.start(lambda event: self.outputs.extend(self.scheduler.handle(event)))
        self.scheduler = Scheduler(self.limits, features=[EncodedFeature(self.runs)])
        self.scheduler.begin(new_attachment(self.cache))
        self.sequences: dict[int, Sequence] = {}

    def add(
        self, seq_id: int, pictures: Iterable[Picture], prompt_len: int = 3, max_tokens: int = 4, **spec: int
    ) -> Sequence:
        sequence = self.sequences[seq_id] = make_sequence(seq_id, prompt_len, max_tokens)
        sequence.spec = replace(sequence.spec, **spec)
        if pictures := tuple(pictures):
            sequence.features = (EncodedSequence(pictures, self.runs),)
        self.scheduler.add(sequence)
        return sequence

    def check(self, plan: Any) -> None:
        super().check(plan)
        for entry in plan.entries:
            for each in self.sequences[entry.seq_id].features:
                assert each.pin is not None
                for picture in each.inputs:
                    rows = each.pin.outputs[picture.hash].rows
                    assert rows.shape == (picture.num_rows, 2) and (rows == ord(picture.hash)).all()


PICTURES = [Picture(name, 1 + i) for i, name in enumerate("abcde")]


@settings(max_examples=examples(120), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(PICTURES), max_size=3),
            st.integers(1, 20),  # prompt
            st.integers(1, 12),  # max_tokens
            st.integers(0, 3),  # steps before the next request
            st.none() | st.integers(1, 10),  # steps after which it is cancelled
            st.integers(0, 3),  # tenant and client
        ),
        min_size=1,
        max_size=14,
    ),
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 3),
    st.none() | st.integers(0, 3),
)
def test_every_sequence_gets_its_tokens_and_its_outputs(
    arrivals: list[tuple[list[Picture], int, int, int, int | None, int]],
    max_rows: int,
    max_rows_kept: int,
    max_num_seqs: int,
    attaches_again: bool,
    num_parts: int,
    lag: int | None,
) -> None:
    options = {"policy": "max_utilization", "num_blocks": 16, "max_num_seqs": max_num_seqs}
    cluster = EncoderCluster(max_rows, max_rows_kept, num_parts, lag, **options)
    cancels: list[list[int]] = []
    for seq_id, (pictures, prompt_len, max_tokens, gap, cancel_after, who) in enumerate(arrivals, start=1):
        cluster.add(seq_id, pictures, prompt_len, max_tokens, tenant=who // 2, client=who % 2)
        if cancel_after is not None:
            cancels.append([cancel_after, seq_id])
        for _ in range(gap):
            for cancel in cancels:
                cancel[0] -= 1
                if cancel[0] == 0:
                    cluster.scheduler.cancel(cancel[1])
            cluster.step()
    if attaches_again:
        cluster.attach_again()
    cluster.run_until_idle()
    cancelled = {seq_id for left, seq_id in cancels if left <= 0}
    for sequence in cluster.sequences.values():
        if sequence.seq_id not in cancelled:
            assert sequence.output_token_ids == expected_output(sequence)
    for run in cluster.encoder.runs:
        sizes = [picture.num_rows for name in run for picture in PICTURES if picture.hash == name]
        assert len(run) == len(set(run)) and (len(run) == 1 or sum(sizes) <= max_rows)
    kept = cluster.runs.counts.num_bytes
    assert kept <= max_rows_kept * ROW_BYTES or kept > 0, "one sequence may need more"
    assert not any(output.num_users for output in cluster.runs._outputs.values()), "nobody is left"


def test_equal_inputs_are_computed_once_and_several_sequences_in_one_run() -> None:
    cluster = EncoderCluster(max_rows=10, max_rows_kept=100)
    a, b, c, *_ = PICTURES
    cluster.add(1, [a, b])
    cluster.add(2, [b, a, b])
    cluster.add(3, [c])
    cluster.run_until_idle()
    cluster.add(4, [c, a])
    cluster.run_until_idle()
    assert cluster.encoder.runs == [["a", "b", "c"]]
    assert (cluster.runs.counts.num_encoded, cluster.runs.counts.num_rows) == (3, 6)
    assert cluster.runs.counts.num_hits == 8


def one_row(names: str) -> list[Picture]:
    return [Picture(name, 1) for name in names]


def test_clients_and_tenants_take_turns_by_what_was_computed_for_them() -> None:
    cluster = EncoderCluster(max_rows=1, max_rows_kept=100, max_num_seqs=8)
    cluster.add(1, one_row("abcd"), tenant=1, client=1)
    cluster.add(2, one_row("e"), tenant=1, client=1)
    cluster.add(3, one_row("fg"), tenant=1, client=2)
    cluster.add(4, one_row("hij"), tenant=2, client=3)
    for _ in range(2):
        cluster.step()
    cluster.add(5, one_row("k"), tenant=3, client=4)  # who comes late has had nothing, and owes nobody anything
    cluster.run_until_idle()
    assert ["".join(run) for run in cluster.encoder.runs] == list("ahfkibjgcde")
    assert all(each.output_token_ids == expected_output(each) for each in cluster.sequences.values())


def test_rows_count_and_a_run_has_inputs_of_several_clients() -> None:
    cluster = EncoderCluster(max_rows=6, max_rows_kept=100, max_num_seqs=8)
    cluster.add(1, [Picture("a", 4), Picture("b", 4), Picture("c", 4)], client=1)
    cluster.add(2, one_row("defghi"), client=2)
    cluster.run_until_idle()
    assert cluster.encoder.runs == [["a", "d", "e"], ["f", "g", "b"], ["h", "i", "c"]]


def test_what_several_wait_for_comes_at_the_first_turn_of_any_of_them() -> None:
    cluster = EncoderCluster(max_rows=1, max_rows_kept=100, max_num_seqs=8)
    for seq_id, name in enumerate("abcd", start=1):
        cluster.add(seq_id, one_row(name), client=1)
    cluster.add(5, one_row("d"), client=2)
    cluster.run_until_idle()
    assert ["".join(run) for run in cluster.encoder.runs] == list("adbc")


def test_a_client_without_room_is_passed_by_and_the_first_sequence_is_not() -> None:
    cluster = EncoderCluster(max_rows=10, max_rows_kept=4, max_num_seqs=8)
    cluster.add(1, [Picture("a", 2)], max_tokens=30, client=1)
    for _ in range(3):
        cluster.step()  # its output is kept
    cluster.add(2, one_row("b"), max_tokens=30, client=1)
    cluster.add(3, [Picture("c", 2)], client=2)
    cluster.add(4, one_row("d"), client=3)
    cluster.step()
    assert cluster.encoder.runs == [["a"], ["b", "d"]], "c has no room beside a and b"
    cluster.run_until_idle()
    assert all(each.output_token_ids == expected_output(each) for each in cluster.sequences.values())


def test_little_room_lets_nothing_be_computed_again_and_again() -> None:
    """Only the first sequence takes room from what others wait for, and from the last of them."""
    cluster = EncoderCluster(max_rows=1, max_rows_kept=8, max_num_seqs=8)
    names = [chr(ord("a") + index) for index in range(48)]
    for client in range(12):
        cluster.add(client + 1, one_row("".join(names[4 * client : 4 * client + 4])), client=client)
    cluster.run_until_idle()
    assert all(each.output_token_ids == expected_output(each) for each in cluster.sequences.values())
    assert len(names) <= len(cluster.encoder.runs) <= 1.2 * len(names)


def test_there_is_one_run_between_two_steps_and_streams_go_on_meanwhile() -> None:
    cluster = EncoderCluster(max_rows=3, max_rows_kept=100, max_num_seqs=8)
    stream = cluster.add(1, [], max_tokens=30)
    for _ in range(3):
        cluster.step()
    for seq_id, picture in enumerate(PICTURES, start=2):
        cluster.add(seq_id, [picture])
    num_runs, num_tokens = 0, len(stream.output_token_ids)
    while len(cluster.encoder.runs) < 4:
        oldest = cluster.scheduler.session.in_flight[0].plan.step_id
        cluster.step()
        assert not cluster.runs.run(cluster.scheduler._waiting, oldest), "as when a call comes while the step runs"
        assert len(cluster.encoder.runs) <= num_runs + 1
        assert len(stream.output_token_ids) > num_tokens
        num_runs, num_tokens = len(cluster.encoder.runs), len(stream.output_token_ids)
    assert cluster.encoder.runs == [["a", "b"], ["c"], ["d"], ["e"]]


def test_a_stream_gets_a_token_between_two_parts_of_a_run() -> None:
    cluster = EncoderCluster(max_rows=10, max_rows_kept=100, num_parts=5, max_num_seqs=8)
    stream = cluster.add(1, [], max_tokens=30)
    for _ in range(3):
        cluster.step()
    cluster.add(2, PICTURES[:2])
    for num_parts in range(1, 6):
        num_tokens = len(stream.output_token_ids)
        cluster.step()
        assert (cluster.encoder.num_parts, len(cluster.encoder.runs)) == (num_parts, 1)
        assert len(stream.output_token_ids) == num_tokens + 1
    cluster.run_until_idle()
    assert cluster.encoder.num_parts == 5 and cluster.sequences[2].output_token_ids


def test_steps_do_not_wait_for_a_gpu_that_runs_the_encoder_beside_them() -> None:
    cluster = EncoderCluster(max_rows=10, max_rows_kept=100, lag=3, max_num_seqs=8)
    cluster.add(1, [], max_tokens=30)
    for _ in range(3):
        cluster.step()
    late = cluster.add(2, PICTURES[:2])
    for _ in range(4):
        assert late.status is SequenceStatus.WAITING, "the GPU computes its pictures"
        cluster.step()
    assert late.status is not SequenceStatus.WAITING
    cluster.run_until_idle()
    alone = EncoderCluster(max_rows=10, max_rows_kept=100, lag=10**9)
    sequence = alone.add(1, PICTURES[:1])
    alone.run_until_idle()
    assert sequence.output_token_ids == expected_output(sequence), "if nothing else runs, its step waits on the device"


def test_a_gpu_has_the_next_run_while_it_computes_one_and_no_third() -> None:
    cluster = EncoderCluster(max_rows=1, max_rows_kept=100, lag=4, max_num_seqs=8)
    cluster.add(1, [], max_tokens=60)
    for _ in range(3):
        cluster.step()
    a, b, c, d, _ = (Picture(each.hash, 1) for each in PICTURES)
    late = [cluster.add(seq_id, [picture]) for seq_id, picture in enumerate((a, b, c, b, d), start=2)]
    num_runs = []
    for _ in range(4):
        cluster.step()
        num_runs.append(len(cluster.encoder.runs))
    assert num_runs == [1, 2, 2, 3], "the third begins when the first has ended"
    cluster.run_until_idle()
    assert cluster.encoder.runs == [["a"], ["b"], ["c"], ["d"]]
    assert [each.output_token_ids for each in late] == [expected_output(each) for each in late]


def test_runs_under_way_count_as_outputs_that_are_kept() -> None:
    cluster = EncoderCluster(max_rows=1, max_rows_kept=1, lag=4, max_num_seqs=8)
    cluster.add(1, [], max_tokens=60)
    for _ in range(3):
        cluster.step()
    for seq_id, each in enumerate(PICTURES[:3], start=2):
        cluster.add(seq_id, [Picture(each.hash, 1)])
    for _ in range(3):
        cluster.step()
    assert cluster.encoder.runs == [["a"]], "there is room for one"
    cluster.run_until_idle()
    assert cluster.encoder.runs == [["a"], ["b"], ["c"]]


def test_the_least_recently_used_output_makes_room() -> None:
    cluster = EncoderCluster(max_rows=10, max_rows_kept=5)
    a, b, c, *_ = PICTURES
    for seq_id, picture in enumerate((a, b, a, c, a, b), start=1):
        cluster.add(seq_id, [picture])
        cluster.run_until_idle()
    assert cluster.encoder.runs == [["a"], ["b"], ["c"], ["b"]]
    assert cluster.runs.counts.num_bytes <= 5 * ROW_BYTES


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, CapacityError], ids=["a run", "the capture of its graph"])
def test_a_device_without_memory_ends_only_those_that_need_it(kind: type[Exception]) -> None:
    cluster = EncoderCluster(max_rows=10, max_rows_kept=5)
    cluster.encoder.error = kind("no room")
    failed, other = cluster.add(1, [PICTURES[0]]), cluster.add(2, [])
    cluster.run_until_idle()
    [error] = [output.error for output in cluster.outputs if output.sequence is failed]
    assert isinstance(error, CapacityError) and "no room" in str(error)
    assert other.output_token_ids == expected_output(other)


def test_a_run_whose_sequences_are_all_cancelled_is_given_up_at_once() -> None:
    """It has much memory, and the next picture may come late."""
    cluster = EncoderCluster(max_rows=10, max_rows_kept=100, num_parts=5, max_num_seqs=8)
    stream = cluster.add(1, [], max_tokens=30)
    for _ in range(3):
        cluster.step()
    cluster.add(2, PICTURES[:2])
    cluster.add(3, PICTURES[1:2])
    cluster.step()
    run = cluster.encoder.last
    cluster.scheduler.cancel(2)
    cluster.step()
    assert run() is not None and cluster.encoder.num_parts == 2, "the other one waits for it"
    cluster.scheduler.cancel(3)
    cluster.step()
    assert run() is None and cluster.encoder.num_parts == 2
    late = cluster.add(4, PICTURES[:1])
    cluster.run_until_idle()
    assert cluster.encoder.runs == [["a", "b"], ["a"]] and cluster.runs.counts.num_encoded == 1
    assert [each.output_token_ids for each in (stream, late)] == [expected_output(each) for each in (stream, late)]


@pytest.mark.parametrize("have_tenants", [False, True])
def test_nobody_waits_for_ever_behind_clients_that_come_later(have_tenants: bool) -> None:
    """Each brings one picture, as fast as they are computed."""
    cluster = EncoderCluster(max_rows=1, max_rows_kept=1000)
    cluster.add(1, [Picture("a", 1), Picture("b", 1)], client=1, tenant=1)
    for later in range(12):
        number = 2 + later
        cluster.add(number, [Picture(chr(ord("A") + later), 1)], client=number, tenant=number if have_tenants else 1)
        cluster.step()
    assert ["b"] in cluster.encoder.runs[:8]


def test_clients_without_room_are_passed_by_without_looking_at_all_others_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, num_clients, num_looks = EncoderCluster(max_rows=1000, max_rows_kept=40), 60, 0
    look = EncoderRuns._inputs_of

    def inputs_of(runs: EncoderRuns[Picture], sequence: Sequence) -> Iterable[Picture]:
        nonlocal num_looks
        num_looks += 1
        return look(runs, sequence)

    for client in range(num_clients):
        cluster.add(1 + client, [Picture(chr(300 + 8 * client + i), 5) for i in range(8)], client=1 + client)
    monkeypatch.setattr(EncoderRuns, "_inputs_of", inputs_of)
    cluster.step()
    assert len(cluster.encoder.runs[0]) == 8 and num_looks < 20 * num_clients
