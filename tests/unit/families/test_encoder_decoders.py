"""Every family with an encoder and a decoder in both workers, compared with transformers on the same random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from services.common.attention.relative_bias import causal_buckets, two_sided_buckets
from services.common.families.shape import RelativeBias
from services.dense_worker.encoders.source import swin_encoder
from tests.support.dense.encoder_decoder_models import (
    ENCODER_DECODERS,
    load_true_encoder_decoder,
    make_encoder_decoder,
    random_source,
    true_decoder_logits,
)
from tests.support.dense.encoder_output import output_of
from tests.support.dense.whole_model import NUM_SOURCE_SLOTS, WholeModel

torch.set_num_threads(1)
BOUND = 2e-5  # relative to the largest logit: both compute in float32, in another order of sums
PROMPT = [3, 9, 8, 7, 6, 5, 11, 12, 13, 14, 15]
OTHER_PROMPT = [3, 40]
NUM_DECODED = 6


@pytest.fixture(scope="module", params=ENCODER_DECODERS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder_decoder(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def truth(path: Path) -> PreTrainedModel:
    return load_true_encoder_decoder(path)


def check_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= BOUND * expected.abs().max()


def test_chunks_and_decoding_with_different_inputs(path: Path, truth: PreTrainedModel) -> None:
    """Two sequences in one batch, one in chunks; then both decode greedily, across many blocks."""
    model, sources = WholeModel(path), {1: random_source(truth, 31, seed=1), 2: random_source(truth, 7, seed=2)}
    model.open(1, PROMPT, source=sources[1])
    rows = [model.step((1, 4, 0))[0]]
    model.open(2, OTHER_PROMPT, source=sources[2])
    first, second = model.step((1, 7, 4), (2, 2, 0))
    check_logits(torch.cat([*rows, first]), true_decoder_logits(truth, sources[1], PROMPT))
    check_logits(second, true_decoder_logits(truth, sources[2], OTHER_PROMPT))
    token_ids = {1: list(PROMPT), 2: list(OTHER_PROMPT)}
    for _ in range(NUM_DECODED):
        sampled = [(1, int(first[-1].argmax())), (2, int(second[-1].argmax()))]
        for seq_id, token_id in sampled:
            token_ids[seq_id].append(token_id)
        entries = [(seq_id, 1, len(each) - 1) for seq_id, each in token_ids.items()]
        first, second = model.step(*entries, sampled=sampled)
    for seq_id, prompt, last in ((1, PROMPT, first), (2, OTHER_PROMPT, second)):
        expected = true_decoder_logits(truth, sources[seq_id], token_ids[seq_id])
        assert token_ids[seq_id][len(prompt) :] == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
        check_logits(last, expected[-1:])


def test_equal_inputs_are_computed_once_and_forks_share_them(path: Path, truth: PreTrainedModel) -> None:
    model, source = WholeModel(path), random_source(truth, 12, seed=3)
    model.open(1, PROMPT, source=source)
    assert model.waits_for_source(1)
    model.step((1, len(PROMPT), 0))
    model.open(2, OTHER_PROMPT, source=source)
    assert not model.waits_for_source(2)
    forked = [(1, 3, len(PROMPT))]
    forced = [(3, 17)]
    second, third = model.step((2, 2, 0), (3, 1, len(PROMPT)), forks=forked, forced=forced)
    check_logits(second, true_decoder_logits(truth, source, OTHER_PROMPT))
    check_logits(third, true_decoder_logits(truth, source, [*PROMPT, 17])[-1:])
    assert model.cache.pools["sources"].num_used_blocks == 1
    model.cache.close_sequences([1, 2, 3])
    assert model.cache.pools["sources"].num_used_blocks == 0
    model.open(4, OTHER_PROMPT, source=source)  # what nobody reads any more is still found
    assert not model.waits_for_source(4)


def test_the_output_of_the_encoder_outlives_the_dense_worker(path: Path, truth: PreTrainedModel) -> None:
    model, source = WholeModel(path), random_source(truth, 12, seed=4)
    model.open(1, PROMPT, source=source)
    model.step((1, len(PROMPT), 0))
    model.cache.abort_steps()
    model.replace_dense()
    tokens = [*PROMPT, 21]
    num_cached = model.open(1, tokens, source=source)
    assert num_cached == len(PROMPT) and not model.waits_for_source(1)
    check_logits(model.step((1, 1, len(PROMPT)))[0], true_decoder_logits(truth, source, tokens)[-1:])


def test_a_step_that_is_lost_leaves_nothing_to_be_found(path: Path, truth: PreTrainedModel) -> None:
    model, source = WholeModel(path), random_source(truth, 12, seed=5)
    model.open(1, PROMPT, source=source)
    model.step((1, len(PROMPT), 0), is_lost=True)
    model.open(1, PROMPT, source=source)
    assert model.waits_for_source(1)
    check_logits(model.step((1, len(PROMPT), 0))[0], true_decoder_logits(truth, source, PROMPT))


def test_inputs_that_nobody_reads_make_room(path: Path, truth: PreTrainedModel) -> None:
    model = WholeModel(path)
    for seq_id in range(2 * NUM_SOURCE_SLOTS):
        source = random_source(truth, 9, seed=10 + seq_id)
        model.open(seq_id, OTHER_PROMPT, source=source)
        [logits] = model.step((seq_id, 2, 0))
        check_logits(logits, true_decoder_logits(truth, source, OTHER_PROMPT))
        model.cache.close_sequences([seq_id])
    assert model.cache.pools["sources"].num_cached_blocks == NUM_SOURCE_SLOTS


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20)])
def test_buckets_are_those_of_transformers(num_buckets: int, max_distance: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    bias, length = RelativeBias(num_buckets, max_distance), 300
    behind = torch.arange(1 - length, length)
    options = {"num_buckets": num_buckets, "max_distance": max_distance}
    expected = T5Attention._relative_position_bucket(behind, bidirectional=True, **options)
    assert torch.equal(two_sided_buckets(bias, length), expected)
    expected = T5Attention._relative_position_bucket(-torch.arange(length), bidirectional=False, **options)
    assert torch.equal(causal_buckets(bias, length), expected)


def test_pages_in_parts_have_the_rows_of_whole_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_encoder_decoder(tmp_path, "nougat")
    truth, body = load_true_encoder_decoder(path), WholeModel(path).weights.encoder.body
    pages = [random_source(truth, 0, seed) for seed in range(2)]
    monkeypatch.setattr(swin_encoder, "MAX_SCORES", 500)  # two windows
    monkeypatch.setattr(swin_encoder, "MAX_MLP_ROWS", 7)
    with torch.inference_mode():
        expected = truth.encoder(torch.stack(pages)).last_hidden_state.flatten(0, 1)
        check_logits(output_of(body, pages), expected)
