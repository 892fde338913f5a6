"""Channels between two real processes, on one GPU, on two, and on a CPU: data, handoffs, epochs, aborts, deaths."""

from __future__ import annotations

import itertools
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from services.channel import Channel, ChannelAborted, ChannelSpec, Flag
from services.channel.factory import create_channel
from services.common.errors import CapacityError
from services.common.gpu import gpu_uuid
from tests.gpu.channel_peer import DONE, MAPPED, SPEC, WAIT_TIMEOUT_S, answer_to, own_stream
from tests.support.cluster import REPOSITORY

NUM_ROUNDS = 40
REPLY_TIMEOUT_S = 60.0  # a process imports torch and makes its CUDA context
DEVICE_TIMEOUT_S = 20.0
RELEASE_S = 2.0  # bound for an abort to release all waits
LONG_AFTER_S = 3.0
EPOCH = secrets.randbits(63)
QUESTION_READY = [Flag.QKV_READY, Flag.LONG_STEP_QKV_READY]  # for short steps, and for long ones
attachment_ids = itertools.count(1)

pytestmark = pytest.mark.timeout(200)

PAIRS = [
    pytest.param(("cpu", "cpu", "shm"), id="cpu"),
    pytest.param(("cuda:0", "cuda:0", "cuda_ipc_queued"), id="one-gpu", marks=pytest.mark.gpu),
    pytest.param(("cuda:0", "cuda:0", "cuda_ipc_spinning"), id="one-gpu-spinning", marks=pytest.mark.gpu),
    pytest.param(("cuda:0", "cuda:1", "cuda_ipc_queued"), id="two-gpus", marks=pytest.mark.gpu),
    pytest.param(("cuda:1", "cuda:0", "cuda_ipc_spinning"), id="two-gpus-spinning", marks=pytest.mark.gpu),
]


@dataclass(frozen=True)
class Devices:
    """The devices of the owner and the peer, and the kind of channel between them."""

    owner: torch.device
    peer: torch.device
    kind: str

    def make_channel(self, spec: ChannelSpec, attachment_id: int) -> Channel:
        if self.kind == "shm":
            return create_channel(self.owner, "", spec, EPOCH, attachment_id, 0, WAIT_TIMEOUT_S)
        from services.channel.cuda_ipc import CudaIpcChannel  # needs cuda-bindings

        return CudaIpcChannel.create(self.owner, self.kind, spec, EPOCH, attachment_id, 0)


class Peer:
    """The process at the other end, see `channel_peer.py`."""

    def __init__(self, device: torch.device) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.channel_peer", str(device)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def send(self, *words: object) -> None:
        """Sends a command. The reply comes when the command has been carried out."""
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin)

    def reply(self) -> str:
        return self._replies.get(timeout=REPLY_TIMEOUT_S)

    def ask(self, *words: object) -> str:
        self.send(*words)
        return self.reply()

    def map(self, channel: Channel, attachment_id: int, epoch: int = EPOCH) -> str:
        return self.ask("map", channel.kind, channel.handle.decode(), epoch, attachment_id)

    def kill(self) -> None:
        """Kills the process and waits until it has ended."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(REPLY_TIMEOUT_S)
        self._reader.join(REPLY_TIMEOUT_S)

    def stop(self) -> int:
        """Closes the input, which ends the process. Returns its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self._process.wait(REPLY_TIMEOUT_S)
        finally:
            self._process.kill()
            self._reader.join(REPLY_TIMEOUT_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._replies.put(line.strip())


class Owner:
    """This process's end of a new channel."""

    def __init__(self, devices: Devices) -> None:
        self.device = devices.owner
        self.attachment_id = next(attachment_ids)
        self.channel = devices.make_channel(SPEC, self.attachment_id)
        self._generator = torch.Generator().manual_seed(self.attachment_id)

    def questions(self, count: int) -> torch.Tensor:
        """[count, max_tokens, qkv_size], random."""
        shape = (count, SPEC.max_tokens, SPEC.qkv_size)
        return torch.randn(shape, generator=self._generator).to(SPEC.dtype).to(self.device)

    def expect(self, questions: torch.Tensor) -> torch.Tensor:
        """The answers, [count, max_tokens, attn_size]."""
        answers = self.room_for_answers(len(questions))
        for question, answer in zip(questions, answers, strict=True):
            answer_to(question, answer)
        return answers

    def room_for_answers(self, count: int) -> torch.Tensor:
        return torch.zeros(count, SPEC.max_tokens, SPEC.attn_size, dtype=SPEC.dtype, device=self.device)

    def ask(self, question: torch.Tensor, answer: torch.Tensor, question_ready: Flag = Flag.QKV_READY) -> None:
        """One round: enqueued on a GPU, run at once on a CPU."""
        self.channel.qkv.copy_(question)
        self.channel.signal(question_ready)
        self.channel.wait(Flag.ATTENTION_READY)
        answer.copy_(self.channel.attn_out)

    def wait(self, flag: Flag = Flag.ATTENTION_READY) -> None:
        """Waits for the flag. Returns when the device has passed the wait; raises after an abort."""
        self.channel.wait(flag)
        self.finish()

    def finish(self) -> None:
        """Waits until the device has run everything. Fails after a timeout; raises after an abort."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            deadline = time.monotonic() + DEVICE_TIMEOUT_S
            while not event.query():
                if time.monotonic() > deadline:
                    self.channel.abort()
                    raise AssertionError(f"{self.device} still waits after {DEVICE_TIMEOUT_S} s")
                time.sleep(1e-3)
        self.channel.check()


@pytest.fixture(scope="module", params=PAIRS)
def devices(request: pytest.FixtureRequest) -> Iterator[Devices]:
    """The devices. A new stream on the owner's device is current, as in the workers."""
    owner, peer, kind = request.param
    devices = Devices(torch.device(owner), torch.device(peer), kind)
    if max(devices.owner.index or 0, devices.peer.index or 0) >= max(1, torch.cuda.device_count()):
        pytest.skip(f"needs 2 GPUs, there is {torch.cuda.device_count()}")
    with own_stream(devices.owner):
        yield devices


@pytest.fixture(scope="module")
def peer(devices: Devices) -> Iterator[Peer]:
    """One peer for all tests on these devices that leave it alive."""
    peer = Peer(devices.peer)
    yield peer
    assert peer.stop() == 0


@pytest.fixture
def peer_to_kill(devices: Devices) -> Iterator[Peer]:
    """A peer for a test that may end it."""
    peer = Peer(devices.peer)
    yield peer
    peer.stop()


@pytest.fixture
def owner(devices: Devices) -> Iterator[Owner]:
    owner = Owner(devices)
    yield owner
    owner.channel.close()


@pytest.fixture
def mapped(owner: Owner, peer: Peer, devices: Devices) -> Iterator[Peer]:
    """The peer, with the owner's channel mapped."""
    assert peer.map(owner.channel, owner.attachment_id) == f"{MAPPED} on {devices.peer}"
    yield peer
    assert peer.ask("close") == DONE


def when_waiting(function: Callable[[], object]) -> threading.Thread:
    """Calls the function a moment later, when this thread or its stream waits."""
    timer = threading.Timer(0.3, function)
    timer.start()
    return timer


@pytest.mark.parametrize("question_ready", QUESTION_READY)
def test_each_side_reads_what_the_other_wrote_before_its_signal(
    owner: Owner, mapped: Peer, question_ready: Flag
) -> None:
    assert owner.channel.qkv.device == owner.channel.attn_out.device == owner.device
    questions, answers = owner.questions(NUM_ROUNDS), owner.room_for_answers(NUM_ROUNDS)
    expected = owner.expect(questions)
    mapped.send("answer", NUM_ROUNDS, question_ready.name)
    for question, answer in zip(questions, answers, strict=True):
        owner.ask(question, answer, question_ready)
    owner.finish()
    assert mapped.reply() == DONE
    assert torch.equal(answers, expected) and not torch.equal(answers[0], answers[1])


@pytest.mark.parametrize("question_ready", QUESTION_READY)
def test_handoffs_captured_in_a_graph_on_both_sides_carry_new_data_at_every_replay(
    owner: Owner, mapped: Peer, question_ready: Flag
) -> None:
    if owner.device.type == "cpu":
        pytest.skip("a CPU captures no graphs")
    questions, answers = owner.questions(NUM_ROUNDS), owner.room_for_answers(NUM_ROUNDS)
    expected = owner.expect(questions)
    question, answer = questions[0].clone(), answers[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        owner.ask(question, answer, question_ready)
    mapped.send("replay", NUM_ROUNDS, question_ready.name)
    for index in range(NUM_ROUNDS):
        question.copy_(questions[index])
        graph.replay()
        answers[index].copy_(answer)
    owner.finish()
    assert mapped.reply() == DONE
    assert torch.equal(answers, expected) and not torch.equal(answers[0], answers[1])


@pytest.mark.parametrize("num_tokens", [1, 5, SPEC.max_tokens])
def test_the_peer_fetches_the_rows_of_each_round(owner: Owner, mapped: Peer, num_tokens: int) -> None:
    qkv, attn_out = owner.channel.qkv, owner.channel.attn_out
    rounds = owner.questions(NUM_ROUNDS)[:, :, : SPEC.attn_size]
    fetched = torch.zeros_like(rounds)
    qkv.zero_()
    mapped.send("return", NUM_ROUNDS, num_tokens)
    for sent, back in zip(rounds, fetched, strict=True):
        attn_out.copy_(sent)
        owner.channel.signal(Flag.ATTENTION_READY)
        owner.channel.wait(Flag.QKV_READY)
        back.copy_(qkv[:, : SPEC.attn_size])
    owner.finish()
    assert mapped.reply() == DONE
    assert torch.equal(fetched[:, :num_tokens], rounds[:, :num_tokens])
    assert not fetched[:, num_tokens:].any()


def test_the_peer_copies_many_rows_from_another_gpu_and_nothing_else(
    devices: Devices, owner: Owner, mapped: Peer
) -> None:
    is_far = devices.owner != devices.peer
    assert [mapped.ask("copies", num_tokens) for num_tokens in (1, SPEC.max_tokens)] == ["False", str(is_far)]


def test_errors_are_counted_on_both_sides(owner: Owner, mapped: Peer) -> None:
    owner.channel.add_errors(3)
    assert mapped.ask("count_errors") == "3"


def test_a_stale_epoch_or_attachment_is_refused(owner: Owner, peer: Peer) -> None:
    for epoch, attachment_id in ((EPOCH + 1, owner.attachment_id), (EPOCH, owner.attachment_id + 1)):
        reply = peer.map(owner.channel, attachment_id, epoch)
        assert reply.startswith("StaleEpoch: ")
        assert f"expected epoch {epoch:016x}, attachment {attachment_id}" in reply


def test_an_abort_of_the_peer_releases_this_side_and_is_seen(owner: Owner, mapped: Peer) -> None:
    aborts_at = []

    def abort() -> None:
        aborts_at.append(time.monotonic())
        mapped.send("abort")

    timer = when_waiting(abort)
    with pytest.raises(ChannelAborted, match="went away"):
        owner.wait()
    assert time.monotonic() - aborts_at[0] < RELEASE_S
    timer.join()
    assert mapped.reply() == DONE


def test_an_abort_of_this_side_releases_the_peer(owner: Owner, peer_to_kill: Peer) -> None:
    """The peer's stream waits. If the wait did not end, the peer could not close the channel."""
    assert peer_to_kill.map(owner.channel, owner.attachment_id).startswith(MAPPED)
    assert peer_to_kill.ask("wait_for_ever") == DONE
    owner.channel.abort()
    with pytest.raises(ChannelAborted):
        owner.finish()
    if owner.device.type == "cuda":  # on a CPU, `wait` has raised and the process is gone
        assert peer_to_kill.ask("close") == DONE
    assert (peer_to_kill.stop() == 0) == (owner.device.type == "cuda")


@pytest.mark.parametrize("is_waiting", [False, True], ids=["idle", "waiting"])
def test_a_killed_peer_does_not_block_this_side(owner: Owner, peer_to_kill: Peer, is_waiting: bool) -> None:
    assert peer_to_kill.map(owner.channel, owner.attachment_id).startswith(MAPPED)
    if is_waiting:
        assert peer_to_kill.ask("wait_for_ever") == DONE
    aborts_at = []

    def kill_and_abort() -> None:
        peer_to_kill.kill()
        aborts_at.append(time.monotonic())
        owner.channel.abort()

    timer = when_waiting(kill_and_abort)
    with pytest.raises(ChannelAborted, match="went away"):
        owner.wait()
    assert time.monotonic() - aborts_at[0] < RELEASE_S
    timer.join()
    with pytest.raises(ChannelAborted):
        owner.wait()  # a later wait is released, too


def test_an_abort_of_this_side_completes_that_of_a_dead_peer(owner: Owner, peer_to_kill: Peer) -> None:
    assert peer_to_kill.map(owner.channel, owner.attachment_id).startswith(MAPPED)
    assert peer_to_kill.ask("abort") == DONE
    peer_to_kill.kill()
    timer = when_waiting(owner.channel.abort)
    with pytest.raises(ChannelAborted):
        owner.wait()
    timer.join()


@pytest.mark.parametrize("flag", Flag)
def test_a_wait_long_after_the_abort_is_released(owner: Owner, flag: Flag) -> None:
    """A worker may compile a kernel between the abort and its wait."""
    owner.channel.abort()
    time.sleep(LONG_AFTER_S)
    with pytest.raises(ChannelAborted):
        owner.wait(flag)


@pytest.mark.parametrize("flag", Flag)
def test_an_abort_ends_a_wait_for_any_flag(owner: Owner, flag: Flag) -> None:
    timer = when_waiting(owner.channel.abort)
    with pytest.raises(ChannelAborted):
        owner.wait(flag)
    timer.join()


def test_a_region_that_does_not_fit_is_refused_and_a_later_one_works(devices: Devices, peer: Peer) -> None:
    too_large = replace(SPEC, max_tokens=2**40)
    with pytest.raises(CapacityError, match=r"needs \d{16} bytes of (GPU|shared) memory, .*free"):
        devices.make_channel(too_large, next(attachment_ids))
    owner = Owner(devices)
    assert peer.map(owner.channel, owner.attachment_id).startswith(MAPPED)
    peer.send("answer", 1, Flag.QKV_READY.name)
    questions, answers = owner.questions(1), owner.room_for_answers(1)
    owner.ask(questions[0], answers[0])
    owner.finish()
    assert peer.reply() == DONE and peer.ask("close") == DONE
    assert torch.equal(answers, owner.expect(questions))
    owner.channel.close()


@pytest.mark.gpu
def test_the_region_lies_on_the_chosen_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, there is {torch.cuda.device_count()}")
    other = torch.device("cuda:1")
    with torch.cuda.device("cuda:0"):
        channel = create_channel(other, gpu_uuid(other), SPEC, EPOCH, next(attachment_ids), 0, WAIT_TIMEOUT_S)
        assert channel.qkv.device == channel.attn_out.device == other
        channel.qkv.copy_(torch.ones_like(channel.qkv))
        assert torch.cuda.current_device() == 0
        channel.close()


@pytest.mark.gpu
def test_without_mps_a_kernel_polls_only_if_the_peer_has_another_gpu() -> None:
    """The tests run without MPS; `test_gpu_parity` starts a cluster with it."""
    from services.channel.cuda_ipc import choose_kind

    device = torch.device("cuda:0")
    assert choose_kind(device, gpu_uuid(device)) == "cuda_ipc_queued"
    assert choose_kind(device, "the UUID of another one") == "cuda_ipc_spinning"
    assert choose_kind(device, "the UUID of another one", num_lanes=2) == "cuda_ipc_queued"
