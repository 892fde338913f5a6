"""Families in which some layers have a window, far beyond it, with blocks of their own for these layers.

Compared with transformers on the same random weights, as in `test_families.py`. The blocks of the windows are just as
many as the sequences may hold, so all of them are written again and again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from services.common.kv_cache.sliding_window import SlidingWindow
from tests.support.dense.family_models import load_true_model, make_family_model
from tests.support.dense.whole_model import BLOCK_SIZE, WholeModel
from tests.support.plans import make_plan

torch.set_num_threads(1)
BOUND = 2e-5  # see `test_families.py`
WINDOW = 6
VARIANTS = ("gemma3", "gpt_oss", "gemma2", "gemma4", "gemma4-shared", "cohere2", "olmo3", "exaone4")
FORKED = ("gemma3", "gpt_oss")
CHUNK, MAX_NUM_SEQS = 13, 3
NUM_WINDOW_BLOCKS = SlidingWindow(BLOCK_SIZE, WINDOW).pool_blocks(MAX_NUM_SEQS, 2 * CHUNK)
generator = torch.Generator().manual_seed(7)
PROMPT = torch.randint(3, 96, (74,), generator=generator).tolist()
OTHER = PROMPT[:41] + torch.randint(3, 96, (9,), generator=generator).tolist()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    variants = VARIANTS if metafunc.function is test_chunks_prefixes_and_decoding_with_lost_steps else FORKED
    metafunc.parametrize("path", variants, indirect=True, scope="module")


@pytest.fixture(scope="module")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def truth(path: Path) -> PreTrainedModel:
    return load_true_model(path)


@pytest.fixture
def model(path: Path) -> WholeModel:
    model = WholeModel(path, num_window_blocks=NUM_WINDOW_BLOCKS)
    assert {each for each in model.config.sliding_windows if each is not None} == {WINDOW}
    return model


@torch.inference_mode()
def true_logits(truth: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    return truth(torch.tensor([token_ids]), use_cache=False).logits[0]


def check_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= BOUND * expected.abs().max()


def compute(model: WholeModel, seq_id: int, prompt: list[int]) -> torch.Tensor:
    """The logits of a prompt that is computed in chunks, from the end of its cached prefix on."""
    position, rows = model.open(seq_id, prompt), []
    while position < len(prompt):
        count = min(CHUNK, len(prompt) - position)
        rows += model.step((seq_id, count, position))
        position += count
    return torch.cat(rows)


def check_decoding(
    model: WholeModel, truth: PreTrainedModel, sequences: dict[int, tuple[list[int], torch.Tensor]]
) -> None:
    """Decodes greedily in shared steps, some of which are lost; `sequences`: tokens and last logits, by seq_id."""
    token_ids = {seq_id: list(tokens) for seq_id, (tokens, _) in sequences.items()}
    last = {seq_id: rows for seq_id, (_, rows) in sequences.items()}
    for step in range(3 * WINDOW):
        sampled = [(seq_id, int(rows[-1].argmax())) for seq_id, rows in last.items()]
        for seq_id, token_id in sampled:
            token_ids[seq_id].append(token_id)
        entries = [(seq_id, 1, len(each) - 1) for seq_id, each in token_ids.items()]
        if step % 4 == 3:  # the workers lost it
            model.step(*entries, sampled=sampled, is_lost=True)
            sampled = []
        last = dict(zip(token_ids, model.step(*entries, sampled=sampled), strict=True))
    for seq_id, (tokens, _) in sequences.items():
        expected = true_logits(truth, token_ids[seq_id])
        assert token_ids[seq_id][len(tokens) :] == expected[len(tokens) - 1 : -1].argmax(-1).tolist()
        check_logits(last[seq_id], expected[-1:])


def test_chunks_prefixes_and_decoding_with_lost_steps(model: WholeModel, truth: PreTrainedModel) -> None:
    first = compute(model, 1, PROMPT)
    check_logits(first, true_logits(truth, PROMPT))
    second = compute(model, 2, PROMPT)  # all blocks but the last are there, and the window before it
    assert len(PROMPT) - len(second) == (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
    check_decoding(model, truth, {1: (PROMPT, first), 2: (PROMPT, second)})
    other = compute(model, 3, OTHER)
    check_logits(other, true_logits(truth, OTHER)[-len(other) :])
    check_decoding(model, truth, {3: (OTHER, other)})


def test_a_prefix_whose_window_is_gone_is_computed_again(model: WholeModel, truth: PreTrainedModel) -> None:
    compute(model, 1, PROMPT)
    model.cache.close_sequences([1])
    again = compute(model, 2, PROMPT[:41])
    check_logits(again, true_logits(truth, PROMPT[:41])[-len(again) :])
    for seq_id, shift in ((3, 1), (4, 2)):  # other prompts take all blocks of the windows
        compute(model, seq_id, [(token_id + shift) % 90 + 3 for token_id in PROMPT])
        model.cache.close_sequences([seq_id - 1])
    assert model.cache.num_cached_blocks >= len(PROMPT) // BLOCK_SIZE
    rows = compute(model, 5, PROMPT)
    assert len(rows) > BLOCK_SIZE
    check_logits(rows, true_logits(truth, PROMPT)[-len(rows) :])


def test_forks_share_both_groups_and_go_on_alone(model: WholeModel, truth: PreTrainedModel) -> None:
    """As another answer to the prompt does, in front of its last token."""
    rows = compute(model, 1, PROMPT)
    position = len(PROMPT) - 1
    sampled, forced = [(1, int(rows[-1].argmax()))], [(2, PROMPT[-1])]
    entries = (1, 1, len(PROMPT)), (2, 1, position)
    own, forked = model.step(*entries, sampled=sampled, forks=[(1, 2, position)], forced=forced)
    check_logits(forked, true_logits(truth, PROMPT)[-1:])
    tokens = [*PROMPT, int(rows[-1].argmax())]
    check_decoding(model, truth, {1: (tokens, own), 2: (PROMPT, forked)})
    with_window = model.cache.plan_step(make_plan(forks=[(1, 3, position)]))
    assert "it has dropped" in str(with_window.errors[3]), "the window of that place is gone by now"
    model.cache.commit_step()
