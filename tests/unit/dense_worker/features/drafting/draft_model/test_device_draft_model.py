"""What a draft model drafts: always the text as transformers would continue it, whatever its cache went through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.model_config import load_model_config
from services.common.sampling_params import ReasoningLimit, SamplingParams
from services.dense_worker.features.drafting.draft_model import device_draft_model, model
from services.dense_worker.features.drafting.draft_model.device_draft_model import DeviceDraftModel, PendingModelDrafts
from services.dense_worker.features.drafting.draft_model.load import unsupported_part
from services.dense_worker.features.drafting.draft_model.model import DraftGraphs, DraftModel
from services.dense_worker.features.drafting.kv_cache import draft_blocks
from services.dense_worker.features.drafting.kv_cache.draft_blocks import BLOCK_SIZE, MAX_LATE_TOKENS
from services.dense_worker.model.weights import load_weights
from services.dense_worker.runner.batch_rows import RequestState
from services.dense_worker.sampling import gumbel
from services.dense_worker.sampling.sampler import Sampler
from services.dense_worker.sampling.upload import upload
from services.step import PlanEntry
from tests.support.dense.family_models import RECURRENT, VARIANTS, load_true_model, make_family_model
from tests.support.dense.sequences import make_state
from tests.support.dense.without_cuda import EagerGraphs
from tests.support.examples import examples
from tests.support.models import make_model_dir

torch.set_num_threads(1)
CPU = torch.device("cpu")
VOCAB, NUM_TOKENS, MAX_NUM_SEQS = 160, 3, 4
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    return make_model_dir(tmp_path_factory.mktemp("draft"), "llama", seed=5, **sizes)


@lru_cache(maxsize=4)
def truth_of(path: Path) -> torch.nn.Module:
    return load_true_model(path)


@torch.inference_mode()
def continued(path: Path, text: list[int], num_tokens: int, sampling: SamplingParams = GREEDY) -> tuple[int, ...]:
    """By Hugging Face, which computes the whole text anew for each token."""
    text = list(text)
    for _ in range(num_tokens):
        logits = truth_of(path)(torch.tensor([text]), use_cache=False).logits[0, -1:]
        if sampling.is_greedy:
            text.append(int(logits.argmax()))
            continue
        temperature = np.array([sampling.temperature], np.float32)
        key = np.array([sampling.seed], np.uint64), np.array([len(text)], np.uint64)
        text.append(int(gumbel.draw(logits, temperature, *key)))
    return tuple(text[-num_tokens:])


Added = dict[RequestState, tuple[list[int], list[int]]]  # right tokens and wrong ones


class DraftedSteps:
    """A draft model beside sequences whose tokens the test chooses."""

    def __init__(self, path: Path, num_blocks: int = 64, max_len: int = 500, device: torch.device = CPU) -> None:
        config = load_model_config(path)
        weights = load_weights(path, config, torch.float32, device)
        self._device = device
        self._sampler = Sampler(MAX_NUM_SEQS, config.vocab_size, device)
        self._path = path
        self.on_device = DeviceDraftModel(DraftModel(weights, config, num_blocks, max_len), self._sampler, MAX_NUM_SEQS)
        self._free_slots = list(range(MAX_NUM_SEQS))
        self._num_opened = 0

    def open(self, token_ids: list[int], sampling: SamplingParams = GREEDY, **options: Any) -> RequestState:
        self._num_opened += 1
        slot = self._free_slots.pop()
        sequence = make_state(self._num_opened, token_ids, len(token_ids), sampling, slot=slot, **options)
        self._sampler.add(sequence.slot, sampling, token_ids, [], ())
        return sequence

    def close(self, sequence: RequestState) -> None:
        self._sampler.remove(sequence.slot)
        self._free_slots.append(sequence.slot)
        self.on_device.forget([sequence])

    def step(self, added: Added, num_tokens: int = NUM_TOKENS) -> dict[int, tuple[int, ...]]:
        """A step of these sequences, each with right drafts and wrong ones; returns the drafts after it.

        The last right token is the one that is sampled after the drafts.
        """
        pending = self.enqueue(added, num_tokens)
        for sequence, (right, _) in added.items():
            sequence.token_ids.extend(right)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return pending.read()

    @torch.inference_mode()
    def enqueue(self, added: Added, num_tokens: int = NUM_TOKENS) -> PendingModelDrafts:
        """The drafts after such a step, whose tokens the host does not know yet."""
        entries, sampled = [], list[int]()
        for sequence, (right, wrong) in added.items():
            if wrong and wrong[0] == right[-1]:
                wrong = [(wrong[0] + 1) % VOCAB, *wrong[1:]]
            drafts = (*right[:-1], *wrong)
            num_known = len(sequence.token_ids)
            entries.append(
                PlanEntry(sequence.seq_id, num_known - 1, 1 + len(drafts), 1 + len(drafts), tuple(drafts))
            )
            sampled += [*right, *((token + 1) % VOCAB for token in wrong)]  # what follows a wrong draft means nothing
        on_device = upload(np.array(sampled), self._device)
        return self.on_device.draft(entries, list(added), on_device, num_tokens)

    def check(self, drafts: dict[int, tuple[int, ...]], sequences: list[RequestState]) -> None:
        for sequence in sequences:
            if found := drafts.get(sequence.seq_id):
                assert found == continued(self._path, sequence.token_ids, len(found), sequence.spec.sampling)


@pytest.fixture
def drafting(path: Path) -> Iterator[DraftedSteps]:
    yield DraftedSteps(path)


def test_drafts_follow_the_last_right_draft(drafting: DraftedSteps) -> None:
    first, second = drafting.open([5, 9, 17, 3]), drafting.open([101, 4])
    for added in [([7], []), ([7, 8], [9]), ([1, 2, 3, 4], []), ([6], [6, 6, 6])]:
        drafts = drafting.step({first: added, second: ([30], [])})
        assert len(drafts[1]) == len(drafts[2]) == NUM_TOKENS
        drafting.check(drafts, [first, second])
    assert len(drafting.step({second: ([1], [])}, num_tokens=7)[2]) == 7


def test_drawn_drafts_have_the_noise_of_the_served_model(drafting: DraftedSteps) -> None:
    """A draft model with the same logits drafts what the sampler will draw."""
    options = [SamplingParams(temperature=0.9, seed=7), GREEDY, SamplingParams(temperature=1.3, seed=2**63 + 5)]
    sequences = [drafting.open([5, 9, 17, number], each) for number, each in enumerate(options)]
    for _ in range(3):
        drafts = drafting.step({each: ([8], [3]) for each in sequences})
        drafting.check(drafts, sequences)
    assert len({drafts[each.seq_id] for each in sequences}) == 3


def test_a_long_text_is_computed_in_parts(drafting: DraftedSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device_draft_model.CATCH_UP_TOKENS, "cpu", 40)
    long, short = drafting.open([number % VOCAB for number in range(150)]), drafting.open([3])
    answers = []
    for _ in range(5):
        drafts = drafting.step({long: ([7], []), short: ([8], [])})
        assert drafts[2]
        drafting.check(drafts, [long, short])
        answers.append(len(drafts[1]))
    assert answers == [0, 0, 0, NUM_TOKENS, NUM_TOKENS], "the tokens that it still lacks are fewer than MAX_LATE_TOKENS"
    for _ in range(MAX_LATE_TOKENS + 30):
        long.token_ids.append(11)  # steps without drafts
    assert len(drafting.step({long: ([7], [])})[1]) == NUM_TOKENS


def test_sequences_without_room_get_no_drafts(path: Path) -> None:
    drafting = DraftedSteps(path, num_blocks=3)
    text = [1] * (BLOCK_SIZE - 8)
    first, second, third = (drafting.open([*text, number]) for number in range(3))
    drafts = drafting.step({each: ([7], []) for each in (first, second, third)})
    assert set(drafts) == {1, 2}
    drafting.check(drafts, [first, second])
    assert set(drafting.step({third: ([7], [])})) == {3}, "the first one has not used its blocks for longest"
    drafting.close(second)
    assert set(drafting.step({third: ([7], []), first: ([7], [])})) == {1, 3}
    drafting.on_device.forget_all()
    assert set(drafting.step({first: ([7], [])})) == {1}


def test_a_text_beyond_the_length_of_the_model_gets_no_drafts(path: Path) -> None:
    drafting = DraftedSteps(path, max_len=40)
    sequence = drafting.open([1] * 30)
    while len(sequence.token_ids) + 1 + NUM_TOKENS <= 40:
        assert len(drafting.step({sequence: ([7], [])})[1]) == NUM_TOKENS
    assert drafting.step({sequence: ([7], [])}) == {}


def test_sequences_that_may_have_no_drafts_cost_nothing(drafting: DraftedSteps) -> None:
    options = [
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(bad_words=((3,),)),
        SamplingParams(reasoning_limit=ReasoningLimit(4, 5)),
    ]
    for sampling in options:
        sequence = drafting.open([1, 2], sampling)
        assert drafting.step({sequence: ([7], [])}) == {}
        drafting.close(sequence)
    assert drafting.step({drafting.open([1, 2], has_forced_tokens=True): ([7], [])}) == {}


def test_sequences_of_different_lengths_are_padded_in_groups(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_blocks, "PADDED_TOKENS", 4 * BLOCK_SIZE)
    monkeypatch.setitem(device_draft_model.CATCH_UP_TOKENS, "cpu", 1000)
    drafting = DraftedSteps(path)
    sequences = [drafting.open([number] * length) for number, length in enumerate((200, 3, 300, 70))]
    drafts = drafting.step({each: ([7, 8], [9]) for each in sequences})
    assert set(map(len, drafts.values())) == {NUM_TOKENS} and len(drafts) == 4
    drafting.check(drafts, sequences)


EXPERTS = ("mixtral", "gpt_oss", "minimax_m2", "dots1", "solar_open", "flex_olmo", "hy_v3")
SINKS = ("granite_swa",)
OTHERS = (*EXPERTS, *SINKS, "deepseek", "kimi", "youtu", "gemma4", "qwen3_", *RECURRENT)
SUPPORTED = [name for name in VARIANTS if "moe" not in name and not name.startswith(OTHERS)]


@pytest.mark.parametrize("variant", SUPPORTED)
def test_a_model_of_any_dense_family_drafts_as_in_transformers(tmp_path: Path, variant: str) -> None:
    path = make_family_model(tmp_path, variant, seed=1)
    assert unsupported_part(load_model_config(path)) is None
    drafting = DraftedSteps(path, max_len=100)
    first, second = drafting.open([5, 9, 17, 3, 44, 45, 46, 20, 21, 22, 23, 24]), drafting.open([60, 4])
    for added in [([7], []), ([7, 8], [9])]:
        drafts = drafting.step({first: added, second: ([30], [])})
        assert len(drafts[1]) == len(drafts[2]) == NUM_TOKENS
        drafting.check(drafts, [first, second])


@pytest.mark.parametrize(
    ("variant", "lack"),
    [
        ("mixtral", "a mixture of experts"),
        ("gpt_oss", "a mixture of experts"),
        ("gemma4", "layers that differ"),
        ("gemma4-shared", "layers that differ"),
        ("qwen3_5", "recurrent layers"),
    ],
)
def test_models_of_other_families_are_named(tmp_path: Path, variant: str, lack: str) -> None:
    config = load_model_config(make_family_model(tmp_path, variant))
    assert lack in (unsupported_part(config) or "")


TOKENS = st.integers(0, VOCAB - 1)
ADDED = st.tuples(st.lists(TOKENS, min_size=1, max_size=4), st.lists(TOKENS, max_size=3))
OPERATIONS = st.one_of(
    st.tuples(st.just("open"), st.lists(TOKENS, min_size=1, max_size=90)),
    st.tuples(st.just("fork"), st.integers(0, 3), st.integers(1, 60)),
    st.tuples(st.just("close"), st.integers(0, 3)),
    st.tuples(st.just("run alone"), st.integers(0, 3), st.lists(TOKENS, min_size=1, max_size=30)),
    st.tuples(st.just("lose all")),
    st.tuples(st.just("step"), st.lists(st.one_of(st.none(), ADDED), min_size=4, max_size=4), st.integers(1, 4)),
)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(OPERATIONS, max_size=14), st.integers(3, 8))
def test_drafts_are_right_after_forks_and_wrong_drafts(path: Path, operations: list[Any], num_blocks: int) -> None:
    """Sequences open, fork, end, run without drafts, and lose their blocks to others; workers are restarted."""
    drafting = DraftedSteps(path, num_blocks)
    running: list[RequestState] = []
    for operation in operations:
        match operation:
            case ("open", token_ids) if len(running) < MAX_NUM_SEQS:
                running.append(drafting.open(token_ids))
            case ("fork", index, position) if index < len(running) < MAX_NUM_SEQS:
                running.append(drafting.open(running[index].token_ids[:position]))
            case ("close", index) if index < len(running):
                drafting.close(running.pop(index))
            case ("run alone", index, token_ids) if index < len(running):
                running[index].token_ids.extend(token_ids)
            case ("lose all",):
                drafting.on_device.forget_all()
            case ("step", added, num_tokens):
                pairs = zip(running, added, strict=False)
                drafts = drafting.step({each: some for each, some in pairs if some is not None}, num_tokens)
                drafting.check(drafts, running)
                assert {len(found) for found in drafts.values()} <= {0, num_tokens}
    for sequence in running:
        drafting.close(sequence)
    assert drafting.on_device._blocks.num_free == num_blocks - 1


class EagerDraftGraphs(EagerGraphs):
    """Also of nothing, when they are captured."""

    def capture_all(self, sizes: Iterable[Any]) -> None:
        for size in sizes:
            self._run(size)


def test_passes_of_graphs_are_those_of_the_model(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are padded, and read their inputs where these always are. Here they run as plain functions."""
    monkeypatch.setattr(model, "StepGraphs", EagerDraftGraphs)
    monkeypatch.setattr(model.torch, "cuda", SimpleNamespace(synchronize=lambda: None, Stream=lambda: None))
    drafting = DraftedSteps(path)
    first, second = drafting.open([5, 9, 17, 3] * 17), drafting.open([101, 4], SamplingParams(seed=4))
    with torch.inference_mode():
        captured = DraftGraphs(drafting.on_device._model)
    drafting.on_device._forward = captured.forward
    for added in [([7], []), ([7, 8], [9]), ([1, 2, 3, 4], [5, 5, 5]), ([6], [6])]:
        for sequence in (first, second):
            drafting.check(drafting.step({sequence: added}), [sequence])
        drafting.check(drafting.step({first: added, second: added}), [first, second])


def test_the_parts_of_a_long_text_are_short(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a mask of a part by all tokens would take too much memory."""
    monkeypatch.setattr(device_draft_model, "_MAX_SCORES", 10 * 3 * BLOCK_SIZE)
    drafting = DraftedSteps(path)
    sequence = drafting.open([number % VOCAB for number in range(2 * BLOCK_SIZE + 20)])
    num_answers = 0
    while not (drafts := drafting.step({sequence: ([7], [])}))[1]:
        num_answers += 1
    drafting.check(drafts, [sequence])
    assert num_answers == 2 * BLOCK_SIZE // 10 + 2, "one token comes in each step"
