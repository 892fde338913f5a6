"""The sums over ranks by gloo: here the ranks are threads with connections of their own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from services.common.errors import PeerError
from services.common.rank import Rank
from services.dense_worker.ranks import join_group
from services.dense_worker.ranks.group import LOOPBACK, GlooGroup, naming_ranks
from services.dense_worker.ranks.join_group import RankStore, join_groups
from tests.support.dense.thread_ranks import run_ranks

CPU = torch.device("cpu")


def groups(count: int, timeout_s: float = 20.0) -> list[GlooGroup]:
    return groups_of_lanes(count, 1, timeout_s)[0]


def hurried_groups() -> list[GlooGroup]:
    """Two ranks with the shortest of some bounds in which this machine connects them: it may be busy."""
    for timeout_s in (0.5, 2.0):
        with contextlib.suppress(PeerError):
            return groups(2, timeout_s)
    return groups(2, 8.0)


def groups_of_lanes(count: int, num_lanes: int, timeout_s: float = 20.0) -> list[list[GlooGroup]]:
    """By lane, then by rank."""
    store = RankStore.create()

    def join(index: int) -> Sequence[GlooGroup]:
        found = store if index == 0 else RankStore.find(store.port)
        return join_groups(CPU, found, Rank(index, count), num_lanes, timeout_s)

    return [list(each) for each in zip(*run_ranks(count, lambda group: join(group.rank.index)), strict=True)]


def test_all_ranks_get_the_same_sum_and_the_first_one_all_columns() -> None:
    of_ranks = groups(3)
    tensors = [torch.randn(5, 4, generator=torch.Generator().manual_seed(index)) for index in range(3)]

    def run(index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total, first = tensors[index].clone(), torch.full((3,), index)
        of_ranks[index].add(total)
        of_ranks[index].broadcast(first)
        return total, first, of_ranks[index].gather(tensors[index])

    results = run_ranks(3, lambda group: run(group.rank.index))
    torch.testing.assert_close(results[0][0], sum(tensors))
    for total, first, _ in results:
        assert torch.equal(total, results[0][0]) and first.tolist() == [0, 0, 0]
    assert torch.equal(results[0][2], torch.cat(tensors, dim=1))


def test_what_one_rank_sends_another_receives_in_order() -> None:
    of_ranks = groups(3)
    sent = [torch.randn(5, 4, dtype=torch.bfloat16), torch.arange(7)]

    def run(index: int) -> list[torch.Tensor]:
        if index == 2:
            for each in sent:
                of_ranks[2].send(each, 0)
            return []
        received = [torch.empty_like(each) for each in sent]
        for each in received if index == 0 else ():
            of_ranks[0].receive(each, 2)
        return received

    for found, expected in zip(run_ranks(3, lambda group: run(group.rank.index))[0], sent, strict=True):
        assert torch.equal(found, expected)


def test_lanes_exchange_rows_in_any_order_and_no_rank_waits_before_it_must() -> None:
    """What each lane sends comes in its own order, and the receiver goes on until it needs the rows."""
    lanes = groups_of_lanes(2, num_lanes=2)
    rows = [torch.full((3,), lane) for lane in range(2)]

    def run(index: int) -> list[torch.Tensor]:
        if index == 1:
            for lane in (1, 0):
                lanes[lane][1].send(rows[lane], 0)
            return []
        received = [torch.zeros_like(each) for each in rows]
        ends = [lanes[lane][0].begin_receive(received[lane], 1) for lane in range(2)]
        assert not any(lanes[lane][0].is_waiting for lane in range(2))
        for end in ends:
            end()
        return received

    for found, expected in zip(run_ranks(2, lambda group: run(group.rank.index))[0], rows, strict=True):
        assert torch.equal(found, expected)


def test_a_rank_that_goes_is_found_by_who_has_begun_to_receive() -> None:
    waiting, other = groups(2)
    end = waiting.begin_receive(torch.ones(3), 1)
    other.abort()
    with pytest.raises(PeerError, match="another rank is gone"):
        end()


def test_who_has_begun_to_receive_may_go_himself() -> None:
    going, other = groups(2)
    end = going.begin_receive(torch.ones(3), 1)
    going.abort()
    with pytest.raises(PeerError, match="the ranks have parted"):
        end()
    with pytest.raises(PeerError, match="another rank is gone") as found:  # though the end can still be called
        other.receive(torch.ones(3), 0)
    assert "Timed out" not in str(found.value)


def test_a_rank_that_sends_nothing_is_found() -> None:
    waiting, _other = hurried_groups()
    with pytest.raises(PeerError, match=r"another rank is gone, or does not answer: .*Timed out waiting [528]0+ms"):
        waiting.receive(torch.ones(3), 1)


def test_a_step_without_sampled_rows_gathers_nothing() -> None:
    of_ranks = groups(2)

    def run(index: int) -> torch.Tensor:
        of_ranks[index].add(torch.zeros(0, 4))
        return of_ranks[index].gather(torch.zeros(0, 4))

    assert run_ranks(2, lambda group: run(group.rank.index))[0].shape == (0, 8)


def test_the_store_listens_at_loopback_alone() -> None:
    """As Linux says: it has no authentication."""
    store = RankStore.create()
    sockets = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    listening = [each[1] for each in sockets if each[3] == "0A" and each[1].endswith(f":{store.port:04X}")]
    assert listening == [f"0100007F:{store.port:04X}"]


def test_a_rank_that_does_not_come_is_found() -> None:
    waiting, _other = hurried_groups()
    with pytest.raises(PeerError, match=r"another rank is gone, or does not answer: .*Timed out waiting [528]0+ms"):
        waiting.add(torch.ones(3))


def test_ranks_meet_only_if_all_of_them_come() -> None:
    store = RankStore.create()

    def meet(index: int) -> None:
        found = store if index == 0 else RankStore.find(store.port)
        with pytest.raises(PeerError, match=r"rank 2 has not come within 0\.3 s"):
            found.meet(Rank(index, 3), 0.3)

    run_ranks(2, lambda group: meet(group.rank.index))


def test_a_rank_that_cannot_come_ends_the_meeting_of_the_others() -> None:
    store = RankStore.create()
    timer = threading.Timer(0.1, store.fail, ["no such device"])
    timer.start()

    def meet(index: int) -> None:
        found = store if index == 0 else RankStore.find(store.port)
        with pytest.raises(PeerError, match="no such device"):
            found.meet(Rank(index, 3), 60.0)

    run_ranks(2, lambda group: meet(group.rank.index))
    timer.join()


def test_a_rank_that_has_met_the_others_and_does_not_connect_is_found() -> None:
    store = RankStore.create()

    def join(index: int) -> None:
        if index:
            RankStore.find(store.port).meet(Rank(index, 2), 60.0)
            return
        with pytest.raises(PeerError, match="another rank is gone, or does not answer"):
            join_groups(CPU, store, Rank(0, 2), 1, 0.5)

    run_ranks(2, lambda group: join(group.rank.index))


def test_a_first_rank_that_has_died_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's store would look for it until its time is over."""
    monkeypatch.setattr(join_group, "_connect", lambda port: pytest.fail("nobody listens there"))
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerError, match="the first rank is gone, or does not answer: Connection refused"):
        RankStore.find(port)


def test_a_first_rank_that_dies_while_it_is_looked_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon: the try that was under way ends, and the next one finds nobody."""
    found = list[int]()
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]

        def connect(port: int) -> None:
            found.append(port)
            listener.close()
            raise PeerError("in a second")

        monkeypatch.setattr(join_group, "_connect", connect)
        with pytest.raises(PeerError, match="the first rank is gone, or does not answer: Connection refused"):
            RankStore.find(port)
    assert found == [port]


def test_who_waits_for_a_rank_that_has_met_the_others_and_died_holds_up_nobody() -> None:
    """As gloo waits in its constructor. The event loop of the first rank must not wait for that."""
    store = RankStore.create()
    waiting = [store, RankStore.find(store.port)]
    errors = list[BaseException]()

    def wait(of: RankStore) -> None:
        try:
            of.store.wait(["of a rank that has died"], timedelta(seconds=60))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=wait, args=(each,), daemon=True) for each in waiting]
    for each in threads:
        each.start()
    time.sleep(0.2)  # so that they wait
    failing = threading.Thread(target=store.fail, args=("it has died",), daemon=True)
    failing.start()
    failing.join(10.0)
    assert not failing.is_alive() and not errors
    store.close()
    for each in threads:
        each.join(10.0)
    assert [type(error) for error in errors] == [torch.distributed.DistNetworkError] * 2


def test_only_errors_of_ranks_are_named_so() -> None:
    with pytest.raises(RuntimeError, match=r"^CUDA error: unspecified launch failure"), naming_ranks():
        raise RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(PeerError, match="another rank is gone"), naming_ranks():
        raise torch.distributed.DistBackendError("NCCL error: remote process exited")


@pytest.mark.parametrize("receives", [False, True])
def test_who_waits_is_released_by_the_abort_of_another_rank(receives: bool) -> None:
    waiting, other = groups(2)
    timer = threading.Timer(0.1, other.abort)
    timer.start()
    start_s = time.monotonic()
    with pytest.raises(PeerError, match="another rank is gone"):
        waiting.receive(torch.ones(3), 1) if receives else waiting.add(torch.ones(3))
    assert time.monotonic() - start_s < 10.0, "the operation's own bound is 20 s"
    timer.join()
    other.abort()
    with pytest.raises(PeerError, match="the ranks have parted"):
        other.add(torch.ones(3))


@pytest.mark.parametrize("receives", [False, True])
def test_who_waits_for_a_rank_that_another_one_has_failed_is_released(receives: bool) -> None:
    """Also as long as the error of that rank lives, which refers to the frames that it came through."""
    of_ranks = groups(4, timeout_s=60.0)
    errors = dict[int, BaseException]()

    def run(index: int) -> None:
        try:
            if receives:
                of_ranks[index].receive(torch.ones(3), index + 1)
            else:
                of_ranks[index].add(torch.ones(3))
        except PeerError as error:
            errors[index] = error

    # Each waits for the next one, or, in a sum, for its neighbours in the ring.
    waiting = {index: threading.Thread(target=run, args=(index,), daemon=True) for index in range(4) if index != 2}
    if receives:
        del waiting[3]
    for thread in waiting.values():
        thread.start()
    time.sleep(0.2)  # so that they wait
    of_ranks[2].abort()
    waiting[1].join(30.0)
    for index in waiting:
        of_ranks[index].abort()
    for thread in waiting.values():
        thread.join(30.0)
    assert errors.keys() == waiting.keys()
