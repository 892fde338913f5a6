"""The KV cache with a host tier: blocks that were evicted, or whose worker died, come back with their content.

Each block's content is computed from all tokens up to its end (`content_of`), as keys and values are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.cache.cached_sequence import OpenResult
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.tiers.block_copier import CpuBlockCopier
from services.attn_worker.cache.tiers.host_tier import HostTier
from services.attn_worker.cache.tiers.region import TierRegion
from services.attn_worker.engine import AttentionEngine
from services.attn_worker.openings import Openings
from services.common.errors import DeviceError
from services.step import NewSequence
from tests.support.attention.open_now import fulfilling
from tests.support.examples import examples
from tests.support.plans import make_plan

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_LAYERS, HEAD_DIM = 4, 2, 8
TIMEOUT_S = 20.0
BLOCK_BYTES = NUM_LAYERS * BLOCK_SIZE * 2 * HEAD_DIM * 4
NUM_BYTES = 8192 + 12 * BLOCK_BYTES  # of a region of twelve slots


def content_of(token_ids: Sequence[int], salt: bytes = b"") -> torch.Tensor:
    """What a block holds whose last tokens these are, [NUM_LAYERS, BLOCK_SIZE, 2, HEAD_DIM]."""
    seed = hash((tuple(token_ids), salt)) & (2**63 - 1)
    return torch.randn(NUM_LAYERS, BLOCK_SIZE, 2, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


class WatchedTier(HostTier):
    """A tier that says whether its thread is at work: before it takes what was offered, until that is written."""

    is_working = False

    def _work(self) -> None:
        self.is_working = True
        super()._work()
        self.is_working = False


class Worker:
    """An attention worker's cache with a tier, a memory, and calls in place of an engine thread."""

    def __init__(self, path: Path | None, num_blocks: int = 8, num_slots: int = 16, weights: bytes = b"w") -> None:
        self.cache = build_cache(num_blocks, BLOCK_SIZE, max_model_len=num_blocks * BLOCK_SIZE)
        spec = KVCacheSpec(num_blocks, BLOCK_SIZE, 1, HEAD_DIM, torch.float32, (None,) * NUM_LAYERS)
        self.storage = BlockStorage(spec, spec.token_major_block, CPU)
        self.region = TierRegion.open(path, 8192 + num_slots * BLOCK_BYTES, BLOCK_BYTES, {"test": 1})
        self.copier = CpuBlockCopier(self.storage, self.region.rows(), staging_bytes=3 * BLOCK_BYTES)
        self.tier = WatchedTier(self.region, self.copier, self.cache.pools["blocks"])
        self.cache.use_tier(self.tier)
        self.cache.use_weights(weights)
        self.answered: list[OpenResult] = []
        self.calls: list[Callable[[], None]] = []
        runner: Any = SimpleNamespace(fence=lambda: None)
        self.openings = Openings(self.cache, runner, self._submit, self.answered.append)
        self.next_seq_id = 0
        self.prefix_generation = 0  # what the dense worker says
        self.has_started = False

    def start(self) -> Worker:
        self.tier.start()
        self.has_started = True
        return self

    def _submit(self, function: Callable[..., None], *arguments: Any) -> Any:
        self.calls.append(lambda: function(*arguments))

    def make_calls(self, until: Callable[[], bool]) -> None:
        """Makes the calls of the tier's thread until something is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not until():
            assert time.monotonic() < deadline
            while self.calls:
                self.calls.pop(0)()
            time.sleep(0.001)

    def begin(self, token_ids: Sequence[int], salt: bytes = b"") -> tuple[int, Future[OpenResult]]:
        self.next_seq_id += 1
        opened: Future[OpenResult] = Future()
        new = NewSequence(
            self.next_seq_id,
            "r",
            tuple(token_ids),
            len(token_ids),
            prefix_key=salt,
            prefix_generation=self.prefix_generation,
        )
        self.openings.open(new, fulfilling(opened))
        return self.next_seq_id, opened

    def open(self, token_ids: Sequence[int], salt: bytes = b"") -> tuple[int, int]:
        """Opens a sequence; returns its id and how many of its tokens were found, whose content is checked."""
        seq_id, opened = self.begin(token_ids, salt)
        self.make_calls(opened.done)
        result = opened.result()
        self.check(seq_id, token_ids, result.num_cached_tokens, salt)
        self.cache.check_integrity()
        return seq_id, result.num_cached_tokens

    def compute(self, seq_id: int, token_ids: Sequence[int], num_cached: int, salt: bytes = b"") -> None:
        """Computes the rest of the tokens, and writes the content of the blocks that become full."""
        plan = make_plan([(seq_id, len(token_ids) - num_cached, num_cached)])
        assert self.cache.plan_step(plan).errors == {}
        for index in range(num_cached // BLOCK_SIZE, len(token_ids) // BLOCK_SIZE):
            content = content_of(token_ids[: (index + 1) * BLOCK_SIZE], salt)
            for layer, part in enumerate(content):
                self.storage.layers[layer][self.block_id(seq_id, index)] = part
        self.cache.commit_step()

    def run(self, token_ids: Sequence[int], salt: bytes = b"") -> int:
        """Opens, computes and closes a sequence; returns how many of its tokens were found."""
        seq_id, num_cached = self.open(token_ids, salt)
        self.compute(seq_id, token_ids, num_cached, salt)
        self.cache.close_sequences([seq_id])
        self.cache.check_integrity()
        assert self.cache.num_free_blocks == self.cache.num_blocks
        return num_cached

    def check(self, seq_id: int, token_ids: Sequence[int], num_cached: int, salt: bytes = b"") -> None:
        for index in range(num_cached // BLOCK_SIZE):
            found = torch.stack([layer[self.block_id(seq_id, index)] for layer in self.storage.layers])
            assert torch.equal(found, content_of(token_ids[: (index + 1) * BLOCK_SIZE], salt))

    def block_id(self, seq_id: int, index: int) -> int:
        return int(self.cache._main.block_ids[self.cache._sequences[seq_id].row, index])

    def settle(self) -> None:
        """Waits until what has been offered is written."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.tier._offered or self.tier.is_working:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def end(self) -> None:
        """As a worker that is stopped; the region of one that is killed is the same."""
        if not self.has_started:
            self.start()
        self.tier.close(TIMEOUT_S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def worker(path: Path) -> Iterator[Worker]:
    worker = Worker(path).start()
    yield worker
    worker.end()


def prompt(number: int, num_tokens: int) -> list[int]:
    return [number * 100 + index for index in range(num_tokens)]


def test_evicted_blocks_come_back(worker: Worker) -> None:
    assert worker.run(prompt(1, 18)) == 0
    worker.settle()
    assert worker.tier.counts.num_written_blocks == 4
    assert worker.run(prompt(2, 31)) == 0  # takes all blocks
    worker.settle()
    assert worker.run(prompt(1, 18)) == 16
    assert worker.tier.counts.num_read_blocks == 4
    assert worker.run(prompt(1, 18)) == 16, "they are on the device again"
    assert worker.tier.counts.num_read_blocks == 4


def test_another_process_finds_them_by_weights_salt_and_tokens(path: Path) -> None:
    worker = Worker(path, num_slots=32).start()
    worker.run(prompt(1, 18), b"salt")
    worker.run(prompt(2, 9))
    worker.end()
    worker = Worker(path, num_slots=32, weights=b"other").start()
    assert worker.run(prompt(2, 9)) == 0
    worker.end()
    worker = Worker(path, num_slots=32).start()
    assert worker.tier.counts.num_used_slots == 4 + 2 + 2
    assert worker.run(prompt(1, 18)) == 0, "without the salt"
    assert worker.run(prompt(1, 18), b"pepper") == 0
    assert worker.run([*prompt(1, 9), 7, *prompt(1, 18)[10:]], b"salt") == 8
    assert worker.run(prompt(1, 18), b"salt") == 16
    assert worker.run(prompt(2, 30)) == 8
    worker.end()


def test_what_was_flushed_is_not_found_by_another_process_either(path: Path) -> None:
    worker = Worker(path).start()
    assert worker.run(prompt(1, 18)) == 0
    worker.settle()
    worker.prefix_generation = 7  # a flush
    assert worker.run(prompt(2, 18)) == 0
    worker.settle()
    worker.end()
    worker = Worker(path).start()  # with a new dense worker, which counts from 0 until it asks
    assert worker.cache.prefix_generation == 7
    assert worker.run(prompt(1, 18)) == 0
    assert worker.run(prompt(2, 18)) == 16, "what came after the flush is found"
    worker.prefix_generation = worker.cache.prefix_generation + 1
    assert worker.run(prompt(1, 18)) == worker.run(prompt(2, 18)) == 0
    worker.end()


def test_a_prefix_goes_on_in_the_tier_where_the_device_has_no_more(worker: Worker) -> None:
    long = prompt(1, 31)
    worker.run(long)
    worker.settle()
    worker.run(prompt(2, 13))  # takes the last blocks of the first one, whose beginning stays
    seq_id, opened = worker.begin(long)
    assert not opened.done() and worker.cache.num_sequences == 1
    worker.make_calls(opened.done)
    result = opened.result()
    assert (result.num_cached_tokens, result.num_held_blocks, result.num_pinned_blocks) == (28, 7, 7)
    assert 0 < len(result.missing) < 7
    worker.check(seq_id, long, 28)
    worker.cache.close_sequences([seq_id])


def test_only_as_many_blocks_are_taken_as_are_free(worker: Worker) -> None:
    worker.run(prompt(1, 31))
    worker.settle()
    seq_id, num_cached = worker.open(prompt(2, 20))
    worker.compute(seq_id, prompt(2, 20), num_cached)  # holds five of eight blocks
    other, opened = worker.begin(prompt(1, 31))
    worker.make_calls(opened.done)
    assert opened.result().num_cached_tokens == 12
    worker.check(other, prompt(1, 31), 12)
    worker.cache.close_sequences([seq_id, other])


def test_the_least_recently_used_block_is_overwritten(path: Path) -> None:
    worker = Worker(path, num_slots=6).start()
    for number in (1, 2, 3):
        worker.run(prompt(number, 9))
        worker.settle()
    worker.run(prompt(1, 9))  # used again, on the device
    worker.settle()
    worker.run(prompt(4, 9))
    worker.settle()
    assert worker.tier.counts.num_used_slots == 6
    worker.end()
    worker = Worker(path, num_slots=6).start()
    assert [worker.run(prompt(number, 9)) for number in (1, 3, 4, 2)] == [8, 8, 8, 0]
    worker.end()


def test_a_region_of_fewer_slots_than_a_copy_has_blocks_names_nothing_while_its_slots_change(
    path: Path, monkeypatch: Any
) -> None:
    worker, named = Worker(path, num_slots=2), list[object]()
    read = worker.copier.read

    def look_then_read(block_ids: Sequence[int], rows: Sequence[int]) -> list[int]:
        named.extend(worker.region.entry(row) for row in rows)
        return read(block_ids, rows)

    monkeypatch.setattr(worker.copier, "read", look_then_read)
    worker.start()
    worker.run(prompt(1, 31))
    worker.settle()
    assert worker.tier.counts.num_written_blocks == 7 and worker.tier.counts.num_used_slots == 2
    assert named == [None] * 7
    worker.end()


def test_sequences_that_want_the_same_blocks_share_one_load(worker: Worker) -> None:
    worker.run(prompt(1, 18))
    worker.settle()
    worker.run(prompt(2, 31))
    worker.settle()
    pairs = [worker.begin([*prompt(1, 18), last]) for last in (7, 8, 9)]
    worker.make_calls(lambda: all(opened.done() for _, opened in pairs))
    assert [opened.result().num_cached_tokens for _, opened in pairs] == [16] * 3
    assert worker.tier.counts.num_read_blocks == 4 and worker.cache.num_used_blocks == 4
    assert [opened.result().num_pinned_blocks for _, opened in pairs] == [4, 0, 0]
    worker.cache.check_integrity()
    worker.cache.close_sequences([seq_id for seq_id, _ in pairs])


def test_what_waits_when_the_dense_worker_goes_gives_its_blocks_back(path: Path) -> None:
    worker = Worker(path)  # whose thread does not run yet
    worker.start()
    worker.run(prompt(1, 18))
    worker.end()
    worker = Worker(path)
    pairs = [worker.begin(prompt(1, 18)) for _ in range(2)]
    assert worker.cache.num_used_blocks == 4
    worker.openings.cancel_all()
    assert all(opened.cancelled() for _, opened in pairs)
    assert (worker.cache.num_used_blocks, worker.cache.num_sequences) == (0, 0)
    worker.cache.check_integrity()
    worker.start()
    assert worker.run(prompt(1, 18)) == 16
    worker.end()


def test_a_load_that_was_cancelled_under_way_writes_no_block_later(path: Path, monkeypatch: Any) -> None:
    worker = Worker(path).start()
    worker.run(prompt(1, 31))
    worker.end()
    worker = Worker(path)
    write, has_begun = worker.copier.write, []

    def write_slowly(*arguments: Any) -> Any:
        has_begun.append(True)
        time.sleep(0.1)
        return write(*arguments)

    monkeypatch.setattr(worker.copier, "write", write_slowly)
    worker.start()
    _, opened = worker.begin(prompt(1, 31))
    worker.make_calls(lambda: bool(has_begun))
    worker.openings.cancel_all()
    before = [layer.clone() for layer in worker.storage.layers]
    time.sleep(0.3)
    assert len(has_begun) == 1 and opened.cancelled()
    assert all(torch.equal(*pair) for pair in zip(before, worker.storage.layers, strict=True))
    assert not worker.calls, "nobody waits for its answer"
    worker.end()


def test_a_copy_that_hangs_is_an_error(worker: Worker, monkeypatch: Any) -> None:
    monkeypatch.setattr("services.attn_worker.cache.tiers.host_tier._CANCEL_TIMEOUT_S", 0.1)
    with worker.tier._is_loading, pytest.raises(DeviceError, match=r"not ended a copy within 0\.1 s"):
        worker.tier.cancel_loads()


def test_what_does_not_fit_into_the_queue_is_skipped_and_counted(path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("services.attn_worker.cache.tiers.host_tier.MAX_OFFERED", 5)
    worker = Worker(path)
    worker.run(prompt(1, 18))
    worker.run(prompt(2, 10))
    assert worker.tier.counts.num_skipped_blocks == 2
    worker.start()
    worker.settle()
    assert worker.tier.counts.num_written_blocks == 4
    worker.end()


def test_a_block_that_is_overwritten_while_it_waits_is_not_copied(path: Path) -> None:
    worker = Worker(path)
    worker.run(prompt(1, 18))
    worker.run(prompt(2, 31))  # takes its blocks
    worker.start()
    worker.settle()
    counts = worker.tier.counts
    assert (counts.num_skipped_blocks, counts.num_written_blocks) == (4, 7)
    assert not worker.tier.has(b"") and worker.run(prompt(1, 18)) == 0
    worker.end()


def test_a_block_that_changes_during_its_copy_is_not_kept(path: Path, monkeypatch: Any) -> None:
    worker = Worker(path)
    read = worker.copier.read

    def change_then_read(*arguments: Any) -> Any:
        monkeypatch.undo()
        worker.run(prompt(2, 31))
        return read(*arguments)

    worker.run(prompt(1, 18))
    monkeypatch.setattr(worker.copier, "read", change_then_read)
    digests = list(worker.tier._offered)
    worker.start()
    worker.settle()
    assert not any(worker.tier.has(digest) for digest in digests)
    assert worker.run(prompt(2, 31)) == 28
    worker.end()


def test_if_the_thread_fails_blocks_are_computed_again(path: Path, monkeypatch: Any) -> None:
    worker = Worker(path).start()
    worker.run(prompt(1, 18))
    worker.end()
    worker = Worker(path)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("an error of the device")

    monkeypatch.setattr(worker.copier, "write", fail)
    worker.start()
    assert worker.run(prompt(1, 18)) == 0
    assert worker.run(prompt(1, 18)) == 16, "on the device"
    worker.tier.offer([b"x" * 16])
    assert worker.tier.counts.num_skipped_blocks > 0
    answers = list[int]()
    worker.tier.load([(b"x" * 16, 0)], None, answers.append)  # asked for before the failure was known
    assert answers == [0]
    worker.end()


def test_if_the_thread_fails_blocks_are_given_back_only_when_no_copy_is_under_way(path: Path, monkeypatch: Any) -> None:
    worker = Worker(path).start()
    worker.run(prompt(1, 31))
    worker.end()
    worker = Worker(path)
    write, finish, answers = worker.copier.write, worker.copier.finish, list[str]()

    def write_once(*arguments: Any) -> Any:
        monkeypatch.setattr(worker.copier, "write", fail)
        return write(*arguments)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("no memory for the second copy of a load")

    def finish_and_note(checksums: Any) -> Any:
        answers.append("finished")
        return finish(checksums)

    monkeypatch.setattr(worker.copier, "write", write_once)
    monkeypatch.setattr(worker.copier, "finish", finish_and_note)
    blocks = [(digest, index) for index, digest in enumerate(worker.region.slots)]
    worker.tier.load(blocks, None, lambda count: answers.append(f"has {count}"))
    worker.start()
    worker.make_calls(lambda: bool(answers) and answers[-1] == "has 0")
    assert answers == ["finished", "has 0"]
    worker.end()


def test_a_tier_of_a_failed_device_leaves_its_file_to_the_next_worker(path: Path, monkeypatch: Any) -> None:
    worker = Worker(path).start()
    worker.run(prompt(1, 18))
    worker.settle()

    def fail() -> None:
        raise DeviceError("the device has failed")

    monkeypatch.setattr(worker.copier, "close", fail)
    with pytest.raises(DeviceError, match="the device has failed"):
        worker.tier.close(TIMEOUT_S)
    later = Worker(path).start()  # the file is not locked
    assert later.run(prompt(1, 18)) == 16
    later.end()


def test_an_engine_whose_device_has_failed_closes_its_tier_too(path: Path) -> None:
    worker = Worker(path).start()
    runner, metrics = SimpleNamespace(fence=lambda: None), SimpleNamespace()
    engine = AttentionEngine(worker.cache, runner, metrics)  # type: ignore[arg-type]
    engine.start()

    def fail() -> None:
        raise DeviceError("the attachment's device has failed")

    engine._attachment = SimpleNamespace(close=fail)  # type: ignore[assignment]
    with pytest.raises(DeviceError, match="the attachment's device has failed"):
        engine.stop(TIMEOUT_S)
    TierRegion.open(path, NUM_BYTES, BLOCK_BYTES, {"test": 1}, lock_timeout_s=0.0).close()


@settings(max_examples=examples(150, 15), deadline=None)
@given(data=st.data())
def test_flipped_bytes_are_found_and_their_blocks_computed_again(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Anywhere in the file, before a worker opens it or while it has it open."""
    path, prompts = tmp_path_factory.mktemp("tier") / "kv", [prompt(1, 18), prompt(2, 31)]
    worker = Worker(path, num_slots=12).start()
    for each in prompts:
        worker.run(each)
        worker.settle()
    worker.end()
    header, table, content = st.integers(0, 200), st.integers(4096, 4095 + 64 * 12), st.integers(8192, NUM_BYTES - 1)
    flips = data.draw(st.lists(st.tuples(header | table | content, st.integers(1, 255)), min_size=1, max_size=3))

    def flip() -> None:
        with path.open("r+b") as file:
            for place, mask in flips:
                file.seek(place)
                [byte] = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte ^ mask]))

    is_open = data.draw(st.booleans())
    if not is_open:
        flip()
    worker = Worker(path, num_slots=12).start()
    if is_open:
        flip()
    for _ in flips:  # a block is read only if all blocks before it are there, so each round may find another flip
        for each in prompts:  # `run` checks the content of what is found
            worker.run(each)
            worker.settle()
    for each in prompts:
        assert worker.run(each) == (len(each) - 1) // BLOCK_SIZE * BLOCK_SIZE
    worker.end()


@settings(max_examples=examples(100, 12), deadline=None)
@given(data=st.data())
def test_the_schedulers_count_of_free_blocks_stays_right(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Sequences with shared prefixes are opened, computed and closed, bytes of the tier change, dense workers go.

    The count follows the answers alone, as the scheduler's does; the content of all that is found is checked.
    """
    path = tmp_path_factory.mktemp("tier") / "kv"
    worker = Worker(path, num_slots=data.draw(st.integers(4, 20))).start()
    num_free = worker.cache.num_blocks
    waiting: dict[int, tuple[list[int], Future[OpenResult]]] = {}
    running: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(5, 25))):
        # At most two at a time, so that there is room for what the scheduler would have reserved.
        kind = data.draw(st.sampled_from(["open", "open", "answer", "close", "flip", "settle", "gone"]))
        if kind == "open" and len(waiting) + len(running) < 2:
            tokens = prompt(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 15)))
            seq_id, opened = worker.begin(tokens)
            waiting[seq_id] = tokens, opened
        elif kind == "answer":
            worker.make_calls(lambda: all(opened.done() for _, opened in waiting.values()))
            for seq_id, (tokens, opened) in waiting.items():
                result = opened.result()
                worker.check(seq_id, tokens, result.num_cached_tokens)
                held = -(-len(tokens) // BLOCK_SIZE)
                worker.compute(seq_id, tokens, result.num_cached_tokens)
                num_free += result.num_freed_blocks - result.num_pinned_blocks - (held - result.num_held_blocks)
                running[seq_id] = tokens
            waiting.clear()
        elif kind == "close" and running:
            num_free += worker.cache.close_sequences([running.popitem()[0]])
        elif kind == "flip":
            with path.open("r+b") as file:
                file.seek(data.draw(st.integers(4096, path.stat().st_size - 1)))
                file.write(b"\x5a")
        elif kind == "settle":
            worker.settle()
        elif kind == "gone":
            worker.openings.cancel_all()
            for seq_id, (_, opened) in list(waiting.items()):
                if opened.cancelled():
                    del waiting[seq_id]
        worker.cache.check_integrity()
        if not waiting:
            assert worker.cache.num_free_blocks == num_free
    worker.openings.cancel_all()
    worker.end()


def test_memory_is_pinned_while_nobody_has_blocks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, pinned, most = Worker(path), list[int](), 5

    def pin_ahead() -> bool:
        if len(pinned) < most:
            pinned.append(worker.cache.num_used_blocks)
            return True
        return False

    monkeypatch.setattr(worker.copier, "pin_ahead", pin_ahead)
    seq_id, num_cached = worker.open(prompt(1, 18))
    worker.compute(seq_id, prompt(1, 18), num_cached)
    worker.start()
    for number in range(1, 4):  # its thread runs, and has nothing else to do in between
        worker.tier.offer([bytes([number]) * 16])
        worker.make_calls(lambda number=number: worker.tier.counts.num_skipped_blocks == number)
        worker.settle()
        time.sleep(0.01)
    assert not pinned
    worker.cache.close_sequences([seq_id])
    worker.make_calls(lambda: len(pinned) == most)
    assert pinned == [0] * most
    worker.end()
    assert worker.tier.counts.num_corrupt_blocks == 0


@pytest.mark.parametrize(("keeps_loaded", "found"), [(True, 16), (False, 0)])
def test_what_was_loaded_is_overwritten_last_or_first(path: Path, found: int, *, keeps_loaded: bool) -> None:
    worker = Worker(path, num_blocks=5, num_slots=8)
    worker.tier._keeps_loaded = keeps_loaded
    worker.start()
    for number in (1, 2):  # of four blocks each, which fill the tier; each evicts the other from the device
        worker.run(prompt(number, 17))
        worker.settle()
    assert worker.run(prompt(1, 17)) == 16, "loaded"
    worker.run(prompt(3, 17))  # four others are written
    worker.settle()
    assert worker.run(prompt(1, 17)) == found, "all blocks of the device have other content"
    worker.end()


def test_blocks_of_sequences_that_leave_now_are_copied_before_those_of_others(path: Path) -> None:
    worker = Worker(path, num_blocks=12)
    digests = {}
    for number in (1, 2, 3):
        seq_id, num_cached = worker.open(prompt(number, 13))
        worker.compute(seq_id, prompt(number, 13), num_cached)
        digests[number] = list(worker.cache._sequences[seq_id].digests)
    worker.tier._offered.clear()
    worker.tier.offer(digests[1])
    worker.tier.offer(digests[2], is_urgent=True)
    worker.tier.offer(digests[3])
    worker.start()
    worker.settle()
    assert list(worker.tier._slots) == [*digests[2], *digests[1], *digests[3]], "in the order of their writing"
    worker.end()
