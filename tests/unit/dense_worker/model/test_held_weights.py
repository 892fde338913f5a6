"""Weights whose memory the launcher holds: the next worker gets the same ones without loading them."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from services.common.config import EMBEDDED_MODEL, load_config
from services.common.errors import PeerError
from services.common.lifeline import Lifeline
from services.common.model_config import load_model_config
from services.dense_worker.build import PreparedModel, prepare_model, resolve_dense_model
from services.dense_worker.features.drafting.eagle.load_eagle import StoredHead
from services.dense_worker.features.drafting.medusa.load_heads import StoredHeads
from services.dense_worker.model.checkpoint import Checkpoint
from services.dense_worker.model.held_weights import HeldWeights
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weight_memory import Empty
from services.dense_worker.model.weights import empty_weights, load_weights
from services.dense_worker.parameters import parameters
from services.launch.lifelines import Lifelines
from tests.chaos.drafts import make_noisy_model
from tests.support.dense.eagle_head import config_of, random_head, write_head
from tests.support.dense.medusa_heads import in_layout_of_medusa, random_heads, write_heads
from tests.support.models import make_model_dir
from tests.support.quantized.checkpoints import FORMATS, quantize_model_dir
from tests.unit.dense_worker.model.test_weights import edit_tensors

CPU = torch.device("cpu")
FLOAT32 = torch.float32


@pytest.fixture
def make_lifeline() -> Iterator[Callable[[], Lifeline]]:
    """Makes the lifelines of workers, one after the other, to one launcher."""
    lifelines = Lifelines()
    lifelines.start()

    def make() -> Lifeline:
        own_end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lifelines.watch(own_end, os.getpid())
        return Lifeline(its_end.detach())

    yield make
    lifelines.close()


class Worker:
    """Counts how often it loads."""

    def __init__(self, lifeline: Lifeline, path: Path, digest: str = "digest") -> None:
        self.num_loads = 0
        self._path, self.config = path, load_model_config(path)
        self.lifeline = lifeline
        self.held = HeldWeights(lifeline, digest, partial(empty_weights, self.config, FLOAT32), CPU)

    def get(self) -> ModelWeights:
        return self.held.get(self._load)

    def _load(self, empty: Empty | None) -> ModelWeights:
        self.num_loads += 1
        return load_weights(self._path, self.config, FLOAT32, CPU, empty)


def assert_equal(weights: ModelWeights, expected: ModelWeights) -> None:
    found = list(weights.named_tensors())
    for (name, tensor), (expected_name, expected_tensor) in zip(found, expected.named_tensors(), strict=True):
        assert name == expected_name and torch.equal(tensor, expected_tensor), name


def test_the_next_worker_has_the_weights_without_loading(make_lifeline: Callable[[], Lifeline]) -> None:
    first, second = Worker(make_lifeline(), EMBEDDED_MODEL), Worker(make_lifeline(), EMBEDDED_MODEL)
    assert not first.held.are_held()
    plain = load_weights(EMBEDDED_MODEL, first.config, FLOAT32, CPU)
    assert_equal(first.get(), plain)
    assert second.held.are_held()
    assert_equal(second.get(), plain)
    assert (first.num_loads, second.num_loads) == (1, 0)


def test_what_a_worker_writes_stays_its_own(make_lifeline: Callable[[], Lifeline]) -> None:
    workers = [Worker(make_lifeline(), EMBEDDED_MODEL) for _ in range(3)]
    plain = load_weights(EMBEDDED_MODEL, workers[0].config, FLOAT32, CPU)
    workers[0].get()
    next(iter(parameters(workers[1].get()))).data.zero_()
    assert_equal(workers[2].get(), plain)
    assert workers[2].num_loads == 0, "else it has found the memory damaged"


def test_other_weights_are_loaded_and_take_their_place(make_lifeline: Callable[[], Lifeline]) -> None:
    first, other = Worker(make_lifeline(), EMBEDDED_MODEL), Worker(make_lifeline(), EMBEDDED_MODEL, "another digest")
    first.get()
    assert not other.held.are_held()
    other.get()
    assert other.num_loads == 1
    assert other.held.are_held() and first.held.are_held()
    other.lifeline.keep([other.held.key])
    assert other.held.are_held() and not first.held.are_held()


def speculation_with(kind: str, directory: Path) -> list[str]:
    """Settings of the embedded model with weights that draft for it."""
    model = load_model_config(EMBEDDED_MODEL)
    hidden, vocab = model.hidden_size, model.vocab_size
    if kind == "draft_model":
        make_noisy_model(directory, num_layers=1)
        return ["scheduler.speculation=draft_model", f"scheduler.draft_model={directory}"]
    if kind == "medusa":
        heads = in_layout_of_medusa(random_heads(3, hidden, vocab))
        write_heads(directory, heads, medusa_num_heads=3, medusa_num_layers=1)
    else:
        head = random_head(hidden, vocab, layers=(1, 0, 2), draft_vocab_size=100, has_embedding=kind == "eagle3, whole")
        write_head(directory, head.tensors, config_of(head, vocab))
    return [f"scheduler.speculation={kind.split(',')[0]}", f"scheduler.speculation_model={directory}"]


@pytest.mark.parametrize("kind", ["draft_model", "medusa", "eagle3", "eagle3, whole"])
def test_what_drafts_is_held_beside_the_served_model(
    kind: str, make_lifeline: Callable[[], Lifeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculation = speculation_with(kind, tmp_path / "drafts")
    num_read = 0
    read = Checkpoint.tensor

    def count(self: Checkpoint, name: str, *part: object) -> torch.Tensor:
        nonlocal num_read
        num_read += self.file_of(name).is_relative_to(tmp_path)
        return read(self, name, *part)

    monkeypatch.setattr(Checkpoint, "tensor", count)

    def prepare(*settings: str) -> PreparedModel:
        config = load_config(None, ["dense.device=cpu", *settings])
        return prepare_model(config, resolve_dense_model(config), print, make_lifeline())

    first, second = prepare(*speculation), prepare(*speculation)
    assert first.held is not None and first.drafter is not None and first.drafter.held is not None
    num_bytes = first.drafter.held.num_bytes
    assert first.own_weight_bytes() == second.own_weight_bytes() == first.held.num_bytes + num_bytes
    first.load()
    assert num_read > 0 and second.own_weight_bytes() == 0
    num_read = 0
    with capture_logs() as logs:
        second.load()
    assert num_read == 0, "they were found in memory"
    found = [each["bytes"] for each in logs if each["event"] == "weights found in memory"]
    assert sorted(found) == sorted([first.held.num_bytes, num_bytes])
    prepare().load()  # the launcher gives up what is of no use any more
    assert second.own_weight_bytes() == num_bytes


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "eagle3, whole"])
def test_heads_in_memory_are_those_of_their_files(
    kind: str, make_lifeline: Callable[[], Lifeline], tmp_path: Path
) -> None:
    path, model = tmp_path / "drafts", load_model_config(EMBEDDED_MODEL)
    speculation_with(kind, path)
    stored: Any
    if kind == "medusa":
        stored = StoredHeads.find(path, model, FLOAT32, CPU, max_num_heads=2)
    else:
        stored = StoredHead.find(path, model, FLOAT32, CPU)

    def load(empty: Empty | None) -> Any:
        assert not found, "they are loaded once"
        return stored.load(empty)

    found = list[dict[str, torch.Tensor]]()
    for _ in range(2):
        held = HeldWeights(make_lifeline(), stored.digest, stored.empty, CPU)
        found.append(dict(held.get(load).named_tensors()))
    plain = dict(stored.load().named_tensors())
    assert found[0].keys() == found[1].keys() == plain.keys()
    assert all(torch.equal(each[name], plain[name]) for each in found for name in plain)


def test_a_head_with_other_token_ids_is_another_one(tmp_path: Path) -> None:
    """One of many numbers, which samples of the file would miss."""
    model = load_model_config(EMBEDDED_MODEL)
    digests = set()
    for name in ("one", "other"):
        head = random_head(model.hidden_size, model.vocab_size, layers=(1, 0, 2), draft_vocab_size=400)
        head.tensors["d2t"][333] += name == "other"
        write_head(tmp_path / name, head.tensors, config_of(head, model.vocab_size))
        digests.add(StoredHead.find(tmp_path / name, model, FLOAT32, CPU).digest)
    assert len(digests) == 2


def test_damaged_memory_is_not_believed(make_lifeline: Callable[[], Lifeline]) -> None:
    first, second = Worker(make_lifeline(), EMBEDDED_MODEL), Worker(make_lifeline(), EMBEDDED_MODEL)
    first.get()
    memory = first.lifeline.ask(first.held.key)
    assert memory is not None
    with mmap.mmap(memory.descriptor, memory.num_bytes) as content:
        content[memory.num_bytes // 2] ^= 1
    os.close(memory.descriptor)
    plain = load_weights(EMBEDDED_MODEL, first.config, FLOAT32, CPU)
    assert_equal(second.get(), plain)
    assert second.num_loads == 1


@pytest.mark.parametrize("name", ["gptq g32, act-order", "fp8 channel, token", "mxfp4"])
def test_quantized_weights_lie_in_it(name: str, tmp_path: Path, make_lifeline: Callable[[], Lifeline]) -> None:
    path = make_model_dir(tmp_path, "llama", hidden_size=128, intermediate_size=256, head_dim=32)
    quantize_model_dir(path, FORMATS[name])
    first, second = Worker(make_lifeline(), path), Worker(make_lifeline(), path)
    assert_equal(first.get(), load_weights(path, first.config, FLOAT32, CPU))
    assert_equal(second.get(), load_weights(path, first.config, FLOAT32, CPU))
    assert (first.num_loads, second.num_loads) == (1, 0)


def test_an_lm_head_that_config_json_denies_is_loaded_again(
    tmp_path: Path, make_lifeline: Callable[[], Lifeline]
) -> None:
    path = make_model_dir(tmp_path, "llama", tie_word_embeddings=True)
    edit_tensors(path, lambda each: each.update({"lm_head.weight": each["model.embed_tokens.weight"] + 1.0}))
    first, second = Worker(make_lifeline(), path), Worker(make_lifeline(), path)
    for worker in (first, second):
        assert_equal(worker.get(), load_weights(path, first.config, FLOAT32, CPU))
        assert worker.num_loads == 1


def test_a_launcher_that_has_ended_is_named() -> None:
    own_end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own_end.close()
    with pytest.raises(PeerError, match="the launcher does not answer"):
        Worker(Lifeline(its_end.detach()), EMBEDDED_MODEL).get()
