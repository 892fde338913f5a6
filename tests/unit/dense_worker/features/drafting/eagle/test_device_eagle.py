"""What an EAGLE-3 head drafts: as by its formula on the whole text, whatever its cache went through."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from services.common.model_config import load_model_config
from services.common.sampling_params import ReasoningLimit, SamplingParams
from services.dense_worker.features.drafting.device_drafter import PendingDrafts
from services.dense_worker.features.drafting.eagle import eagle_model
from services.dense_worker.features.drafting.eagle.device_eagle import DeviceEagle
from services.dense_worker.features.drafting.eagle.eagle_model import EagleGraphs, EagleModel
from services.dense_worker.features.drafting.eagle.load_eagle import StoredHead
from services.dense_worker.features.drafting.kv_cache import draft_blocks
from services.dense_worker.features.drafting.kv_cache.draft_blocks import BLOCK_SIZE
from services.dense_worker.runner.batch_rows import RequestState
from services.dense_worker.sampling.sampler import Sampler
from services.dense_worker.sampling.upload import upload
from services.step import PlanEntry
from tests.support.dense.eagle_head import PlainHead, config_of, random_head, write_head
from tests.support.dense.sequences import make_state
from tests.support.examples import examples
from tests.support.models import make_model_dir
from tests.unit.dense_worker.features.drafting.draft_model.test_device_draft_model import EagerDraftGraphs
from tests.unit.dense_worker.model.test_segments import load_truth

torch.set_num_threads(1)
CPU = torch.device("cpu")
VOCAB, NUM_TOKENS, MAX_NUM_SEQS, MAX_NUM_TOKENS = 160, 3, 4, 400
GREEDY = SamplingParams(temperature=0.0)
HEAD = random_head(64, VOCAB, layers=(2, 0, 1), draft_vocab_size=100)

Added = dict[RequestState, tuple[list[int], list[int]]]  # right tokens and wrong ones


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"), "llama", seed=5)


@pytest.fixture(scope="module")
def truth(path: Path) -> PreTrainedModel:
    return load_truth(path)


class DraftedSteps:
    """A head beside sequences whose tokens the test chooses. Hugging Face gives the residuals of each step."""

    def __init__(
        self,
        path: Path,
        truth: PreTrainedModel,
        directory: Path,
        head: PlainHead = HEAD,
        num_blocks: int = 64,
        max_len: int = 500,
        device: torch.device = CPU,
    ) -> None:
        self._truth, self._head, self._device = truth, head, device
        write_head(directory, head.tensors, config_of(head, VOCAB))
        config = load_model_config(path)
        loaded = StoredHead.find(directory, config, torch.float32, device).load()
        embedding = truth.get_input_embeddings().weight.detach().to(device)
        layer = loaded.with_embedding(embedding)
        self.sampler = Sampler(MAX_NUM_SEQS, VOCAB, device)
        model = EagleModel(loaded.config, layer, num_blocks, max_len)
        self.on_device = DeviceEagle(model, self.sampler, MAX_NUM_SEQS, MAX_NUM_TOKENS)
        self._free_slots = list(range(MAX_NUM_SEQS))
        self._num_opened = 0
        self.starts: dict[RequestState, tuple[int, int]] = {}  # where the head's knowledge begins and ends

    def open(self, token_ids: list[int], sampling: SamplingParams = GREEDY, **options: Any) -> RequestState:
        self._num_opened += 1
        slot = self._free_slots.pop()
        sequence = make_state(self._num_opened, token_ids, len(token_ids), sampling, slot=slot, **options)
        self.sampler.add(sequence.slot, sampling, token_ids, [], ())
        return sequence

    def close(self, sequence: RequestState) -> None:
        self.sampler.remove(sequence.slot)
        self._free_slots.append(sequence.slot)
        self.on_device.forget([sequence])

    def decode(self, sequence: RequestState, right: list[int], wrong: list[int], position: int | None = None) -> Any:
        """An entry and its sampled tokens. The last right token is sampled after the drafts.

        position: of the first row; None: that of the last known token
        """
        position = len(sequence.token_ids) - 1 if position is None else position
        if wrong and wrong[0] == right[-1]:
            wrong = [(wrong[0] + 1) % VOCAB, *wrong[1:]]
        drafts = (*right[:-1], *wrong)
        num_known = len(sequence.token_ids) - position
        entry = PlanEntry(sequence.seq_id, position, num_known + len(drafts), 1 + len(drafts), drafts)
        return entry, [*right, *((token + 1) % VOCAB for token in wrong)]

    def step(self, added: Added, num_tokens: int = NUM_TOKENS, **options: Any) -> dict[int, tuple[int, ...]]:
        """A step of these sequences, each with right drafts and wrong ones; returns the drafts after it."""
        entries = {each: self.decode(each, *some, **options) for each, some in added.items()}
        pending = self.run(entries, num_tokens)
        for sequence, (right, _) in added.items():
            sequence.token_ids.extend(right)
        assert pending is not None
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return pending.read()

    @torch.inference_mode()
    def run(self, entries: dict[RequestState, Any], num_tokens: int | None) -> PendingDrafts | None:
        """Fills in the residuals of a step as the model runner does, and asks for drafts unless that is None."""
        sampled: list[int] = []
        first = 0
        residuals = self.on_device.residuals_out()
        assert residuals is not None
        residuals.memory.fill_(torch.nan)
        for sequence, (entry, tokens) in entries.items():
            sampled += tokens
            text = [*sequence.token_ids, *entry.draft_token_ids]
            end = entry.position + entry.num_tokens
            states = self._truth(torch.tensor([text[:end]]), output_hidden_states=True).hidden_states
            for layer in set(residuals.layers):
                padded = torch.full((MAX_NUM_TOKENS, 64), torch.nan)
                padded[first : first + entry.num_tokens] = states[layer][0, entry.position :]
                kept = residuals.memory.clone()
                residuals.put(layer, padded.to(self._device))
                rows = torch.ones(MAX_NUM_TOKENS, dtype=torch.bool)
                rows[first : first + entry.num_tokens] = False
                residuals.memory[rows] = kept[rows]
            first += entry.num_tokens
        plan = [entry for entry, _ in entries.values()]
        on_device = upload(np.array(sampled, dtype=np.int64), self._device)
        self.on_device.keep(plan, list(entries), on_device if sampled else None)
        return None if num_tokens is None else self.on_device.draft(plan, list(entries), on_device, num_tokens)

    def prompt(self, sequence: RequestState, position: int, num_tokens: int) -> None:
        """A step with a part of a text, which samples nothing."""
        self.run({sequence: (PlanEntry(sequence.seq_id, position, num_tokens, 0), [])}, None)

    def expected(self, sequence: RequestState, num_tokens: int, start: int = 0) -> tuple[int, ...]:
        sampling = sequence.spec.sampling
        options = (start, sampling.temperature, sampling.seed or 0)
        return self._head.draft(self._truth, sequence.token_ids, num_tokens, *options)

    def check(self, drafts: dict[int, tuple[int, ...]], starts: dict[RequestState, int]) -> None:
        expected = {each.seq_id: self.expected(each, NUM_TOKENS, start) for each, start in starts.items()}
        assert drafts == expected


@pytest.fixture
def drafting(path: Path, truth: PreTrainedModel, tmp_path: Path) -> DraftedSteps:
    return DraftedSteps(path, truth, tmp_path / "head")


STEPS: list[tuple[list[int], list[int]]] = [([7], []), ([7, 8], [9]), ([1, 2, 3, 4], []), ([6], [6, 6, 6])]


@pytest.mark.parametrize("has_embedding", [False, True])
@pytest.mark.parametrize("draft_vocab_size", [None, 100])
def test_drafts_follow_the_last_right_draft(
    path: Path, truth: PreTrainedModel, tmp_path: Path, has_embedding: bool, draft_vocab_size: int | None
) -> None:
    options: Any = {"layers": (2, 0, 1), "draft_vocab_size": draft_vocab_size, "has_embedding": has_embedding}
    drafting = DraftedSteps(path, truth, tmp_path / "head", random_head(64, VOCAB, **options))
    first, second = drafting.open([5, 9, 17, 3]), drafting.open([101, 4])
    drafting.check(drafting.step({first: ([8], []), second: ([30], [])}, position=0), {first: 0, second: 0})
    for added in STEPS:
        drafting.check(drafting.step({first: added, second: ([30], [])}), {first: 0, second: 0})
    assert len(drafting.step({second: ([1], [])}, num_tokens=7)[2]) == 7


def test_drawn_drafts_have_the_noise_of_the_served_model(drafting: DraftedSteps) -> None:
    options = [SamplingParams(temperature=0.9, seed=7), GREEDY, SamplingParams(temperature=1.3, seed=2**63 + 5)]
    sequences = [drafting.open([5, 9, 17, number], each) for number, each in enumerate(options)]
    drafting.step({each: ([8], []) for each in sequences}, position=0)
    for _ in range(3):
        drafts = drafting.step({each: ([8], [3]) for each in sequences})
        drafting.check(drafts, dict.fromkeys(sequences, 0))


def test_all_steps_count_also_those_that_nobody_asks_for_drafts(drafting: DraftedSteps) -> None:
    """A prompt in parts, beside another sequence, and steps whose tokens the host learns later."""
    long, short = drafting.open([number % VOCAB for number in range(150)]), drafting.open([3, 4])
    drafting.run({short: drafting.decode(short, [9], [], position=0)}, None)
    short.token_ids.append(9)
    for position in range(0, 120, 40):
        part = PlanEntry(long.seq_id, position, 40, 0), []
        drafting.run({long: part, short: drafting.decode(short, [11], [])}, None)
        short.token_ids.append(11)
    drafting.prompt(long, 120, 10)
    drafting.run({long: drafting.decode(long, [8], [], position=130)}, None)
    long.token_ids.append(8)
    drafting.check(drafting.step({short: ([8], [3]), long: ([1, 2], [])}), {long: 0, short: 0})


@pytest.mark.parametrize("start", [1, 64, 70])
def test_a_sequence_begins_where_its_first_step_does(drafting: DraftedSteps, start: int) -> None:
    """What is before that, a cached prefix, has no residuals."""
    sequence = drafting.open([number % VOCAB for number in range(90)])
    drafting.check(drafting.step({sequence: ([8], [])}, position=start), {sequence: start})
    for added in STEPS:
        drafting.check(drafting.step({sequence: added}), {sequence: start})


def test_tokens_that_are_computed_again_overwrite_the_old_ones(drafting: DraftedSteps) -> None:
    """After a preemption, from anywhere; and a gap begins anew."""
    sequence = drafting.open([number % VOCAB for number in range(16)])
    drafting.step({sequence: ([8], [])}, position=10)
    drafting.check(drafting.step({sequence: ([8], [])}, position=12), {sequence: 10})
    drafting.check(drafting.step({sequence: ([8], [])}, position=3), {sequence: 3})
    sequence.token_ids.extend([7, 8, 9])  # steps that this head has not seen
    drafting.check(drafting.step({sequence: ([8], [1])}), {sequence: 21})
    drafting.on_device.forget_all()
    drafting.check(drafting.step({sequence: ([8], [1])}), {sequence: 22})


def test_a_row_without_a_known_token_after_it_ends_what_the_head_knows(drafting: DraftedSteps) -> None:
    sequence = drafting.open([5, 6, 7, 8])
    drafting.check(drafting.step({sequence: ([9], [])}, position=0), {sequence: 0})
    drafting.run({sequence: (PlanEntry(1, 2, 3, 0), [])}, None)
    assert drafting.on_device._blocks.find(sequence) is None
    sequence.token_ids.append(9)
    drafting.check(drafting.step({sequence: ([8], [])}), {sequence: 5})


def test_sequences_without_room_get_no_drafts(path: Path, truth: PreTrainedModel, tmp_path: Path) -> None:
    drafting = DraftedSteps(path, truth, tmp_path / "head", num_blocks=3)
    text = [1] * (BLOCK_SIZE - 8)
    first, second, third = (drafting.open([*text, number]) for number in range(3))
    drafts = drafting.step({each: ([7], []) for each in (first, second, third)}, position=0)
    drafting.check(drafts, {first: 0, second: 0})
    drafting.check(drafting.step({third: ([7], [])}, position=0), {third: 0})
    assert drafting.on_device._blocks.find(first) is None, "it has not used its blocks for longest"
    drafts = drafting.step({first: ([7], [])})
    drafting.check(drafts, {first: len(text) + 1})
    assert drafting.on_device._blocks.find(second) is None
    while len(third.token_ids) + NUM_TOKENS <= 2 * BLOCK_SIZE:
        drafts = drafting.step({third: ([7], [])})
    drafting.check(drafts, {third: 0})
    assert drafting.step({third: ([7], [])}) == {}, "it needs a third block for drafts, and loses its two"
    drafting.check(drafting.step({third: ([7], [])}), {third: len(third.token_ids) - 2})


def test_a_text_beyond_the_length_of_the_model_gets_no_drafts(
    path: Path, truth: PreTrainedModel, tmp_path: Path
) -> None:
    drafting = DraftedSteps(path, truth, tmp_path / "head", max_len=40)
    sequence = drafting.open([1] * 30)
    drafting.step({sequence: ([7], [])}, position=0)
    while len(sequence.token_ids) + NUM_TOKENS <= 40:
        drafting.check(drafting.step({sequence: ([7], [])}), {sequence: 0})
    assert drafting.step({sequence: ([7], [])}) == {}


def test_sequences_that_may_have_no_drafts_cost_nothing(drafting: DraftedSteps) -> None:
    options: list[dict[str, Any]] = [
        {"sampling": SamplingParams(repetition_penalty=1.1)},
        {"sampling": SamplingParams(bad_words=((3,),))},
        {"sampling": SamplingParams(reasoning_limit=ReasoningLimit(4, 5))},
        {"has_forced_tokens": True},
    ]
    plain = drafting.open([1, 2, 3])
    for each in options:
        sequence = drafting.open([1, 2], **each)
        drafts = drafting.step({sequence: ([7], []), plain: ([8], [])}, position=0)
        drafting.check(drafts, {plain: 0})
        assert drafting.step({sequence: ([7], [])}) == {}
        assert drafting.on_device._blocks.find(sequence) is None
        drafting.close(sequence)


def test_sequences_of_different_lengths_are_padded_in_groups(
    drafting: DraftedSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_blocks, "PADDED_TOKENS", 4 * BLOCK_SIZE)
    sequences = [drafting.open([number] * length) for number, length in enumerate((70, 3, 250, 70))]
    drafting.step({each: ([7], []) for each in sequences}, position=0)
    drafting.check(drafting.step({each: ([7, 8], [9]) for each in sequences}), dict.fromkeys(sequences, 0))


def test_passes_of_graphs_are_those_of_the_head(drafting: DraftedSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are padded, and read their inputs where these always are. Here they run as plain functions."""
    monkeypatch.setattr(eagle_model, "StepGraphs", EagerDraftGraphs)
    monkeypatch.setattr(eagle_model.torch, "cuda", SimpleNamespace(synchronize=lambda: None, Stream=lambda: None))
    first, second = drafting.open([5, 9, 17, 3] * 17), drafting.open([101, 4], SamplingParams(temperature=0.8, seed=4))
    with torch.inference_mode():
        captured = EagleGraphs(drafting.on_device._model)
    sizes: list[int] = []
    monkeypatch.setattr(captured, "_run", lambda size, run=captured._run: (sizes.append(size), run(size)))
    captured._graphs = EagerDraftGraphs(None, None, captured._run)
    drafting.on_device._forward = captured.forward
    drafting.step({first: ([7], []), second: ([8], [])}, position=1)
    assert not sizes, "there is no graph for several sequences"
    for added in STEPS:
        for sequence in (first, second):
            drafting.check(drafting.step({sequence: added}), {sequence: 1})
        drafting.check(drafting.step({first: added, second: added}), {first: 1, second: 1})
    assert set(sizes) == {1, 2}


TOKENS = st.integers(0, VOCAB - 1)
ADDED = st.tuples(st.lists(TOKENS, min_size=1, max_size=3), st.lists(TOKENS, max_size=2))
OPERATIONS = st.one_of(
    st.tuples(st.just("open"), st.lists(TOKENS, min_size=1, max_size=90), st.integers(0, 89)),
    st.tuples(st.just("close"), st.integers(0, 3)),
    st.tuples(st.just("again"), st.integers(0, 3), st.integers(0, 60)),
    st.tuples(st.just("lose all")),
    st.tuples(st.just("step"), st.lists(st.one_of(st.none(), ADDED), min_size=4, max_size=4), st.booleans()),
)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(OPERATIONS, max_size=12), st.integers(2, 8))
def test_drafts_are_right_whatever_happens(
    path: Path, truth: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory, operations: list[Any], num_blocks: int
) -> None:
    """Sequences open behind cached prefixes, end, go back, lose their blocks to others; workers are restarted."""
    drafting = DraftedSteps(path, truth, tmp_path_factory.getbasetemp() / "head", num_blocks=num_blocks)
    running: dict[RequestState, int] = {}  # where the next step of each begins
    for operation in operations:
        sequences = list(running)
        match operation:
            case ("open", token_ids, start) if len(running) < MAX_NUM_SEQS:
                running[drafting.open(token_ids)] = min(start, len(token_ids) - 1)
            case ("close", index) if index < len(running):
                del running[sequences[index]]
                drafting.close(sequences[index])
            case ("again", index, position) if index < len(running):
                sequence = sequences[index]
                running[sequence] = min(position, running[sequence])
            case ("lose all",):
                drafting.on_device.forget_all()
            case ("step", added, is_asked):
                pairs = {each: some for each, some in zip(running, added, strict=False) if some is not None}
                if not pairs:
                    continue
                entries = {each: drafting.decode(each, *some, running[each]) for each, some in pairs.items()}
                pending = drafting.run(entries, NUM_TOKENS if is_asked else None)
                starts = {each: drafting.on_device._blocks.find(each) for each in pairs}
                for sequence, (right, _) in pairs.items():
                    sequence.token_ids.extend(right)
                    running[sequence] = len(sequence.token_ids) - 1
                if pending is not None:
                    known = {each: cached.start for each, cached in starts.items() if cached is not None}
                    drafting.check(pending.read(), known)
    for sequence in running:
        drafting.close(sequence)
    assert drafting.on_device._blocks.num_free == num_blocks - 1
