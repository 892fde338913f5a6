"""Every family with its true parts in both workers, compared with transformers on the same random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.dense.whole_model import BLOCK_SIZE, WholeModel
from tests.support.dense.family_models import VARIANTS, make_family_model

torch.set_num_threads(1)
# Both compute in float32, in another order of sums, of a few hundred numbers each: relative to the largest logit.
BOUND = 2e-5
NUM_DECODED = 5
generator = torch.Generator().manual_seed(5)
PROMPT = torch.randint(3, 96, (21,), generator=generator).tolist()
OTHER_PROMPT = PROMPT[: 3 * BLOCK_SIZE] + torch.randint(3, 96, (7,), generator=generator).tolist()


@pytest.fixture(scope="module", params=VARIANTS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def truth(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def true_logits(truth: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    return truth(torch.tensor([token_ids]), use_cache=False).logits[0]


def check_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= BOUND * expected.abs().max()


def test_logits_of_a_prompt(path: Path, truth: PreTrainedModel) -> None:
    model = WholeModel(path)
    model.open(1, PROMPT)
    (logits,) = model.step((1, len(PROMPT), 0))
    check_logits(logits, true_logits(truth, PROMPT))


def test_chunks_decoding_and_prefix_cache(path: Path, truth: PreTrainedModel) -> None:
    """Two sequences in one batch: one in chunks, the other on a cached prefix; then both decode greedily."""
    model = WholeModel(path)
    model.open(1, PROMPT)
    rows = [model.step((1, 9, 0))[0], model.step((1, 5, 9))[0]]
    num_cached = model.open(2, OTHER_PROMPT)
    assert num_cached == 3 * BLOCK_SIZE
    first, second = model.step((1, 7, 14), (2, len(OTHER_PROMPT) - num_cached, num_cached))
    rows.append(first)
    check_logits(torch.cat(rows), true_logits(truth, PROMPT))
    check_logits(second, true_logits(truth, OTHER_PROMPT)[num_cached:])
    token_ids = {1: list(PROMPT), 2: list(OTHER_PROMPT)}
    for _ in range(NUM_DECODED):
        confirmed = [(1, int(first[-1].argmax())), (2, int(second[-1].argmax()))]
        for seq_id, token_id in confirmed:
            token_ids[seq_id].append(token_id)
        entries = [(seq_id, 1, len(each) - 1) for seq_id, each in token_ids.items()]
        first, second = model.step(*entries, confirmed=confirmed)
    for prompt, each, last in ((PROMPT, token_ids[1], first), (OTHER_PROMPT, token_ids[2], second)):
        expected = true_logits(truth, each)
        assert each[len(prompt) :] == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
        check_logits(last, expected[-1:])
