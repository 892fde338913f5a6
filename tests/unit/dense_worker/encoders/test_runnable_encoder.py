"""Encoders of whole models between the steps of the real scheduler: streams go on, parts are small, rows are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from services.common.model_config import load_model_config
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders import run_in_parts
from services.dense_worker.encoders.source import runnable_encoder
from services.dense_worker.encoders.source.runnable_encoder import RunnableEncoder
from services.dense_worker.model.torch_operations import TorchOperations
from tests.support.dense.encoder_decoder_models import (
    load_true_encoder_decoder,
    make_encoder_decoder,
    random_source,
)
from tests.support.dense.scheduler_cluster import expected_output
from tests.support.dense.vision_models import WITH_ENCODERS, make_vision_model
from tests.support.dense.whole_model import WholeModel
from tests.unit.dense_worker.engine.test_scheduler_sources import Reading, SourceCluster, reader

torch.set_num_threads(1)
MAX_PRODUCTS = 20_000


class EncodingCluster(SourceCluster):
    """With the encoder of a model. Steps are under way while the encoder runs, as in the engine."""

    def __init__(self, path: Path) -> None:
        self.encoder = WholeModel(path).weights.encoder
        runnable = RunnableEncoder(self.encoder, None, torch.float32, torch.device("cpu"))
        super().__init__("guaranteed_no_evict", 60, 4, 80, runnable)
        self.reading = Reading(self.runs)


def true_rows(truth: PreTrainedModel, source: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return truth.get_encoder()(source[None]).last_hidden_state[0]


@pytest.mark.parametrize("variant", ["nougat", "whisper", "t5"])
def test_a_stream_gets_a_token_between_two_parts_of_an_encoder(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_in_parts, "MIN_PART_S", 0.0)
    monkeypatch.setattr(runnable_encoder, "MAX_PRODUCTS", MAX_PRODUCTS)
    path = make_encoder_decoder(tmp_path, variant)
    truth, cluster = load_true_encoder_decoder(path), EncodingCluster(path)
    sources = [random_source(truth, 9, seed=seed) for seed in range(2)]
    with torch.inference_mode():
        num_parts = len(list(cluster.encoder.body.parts(TorchOperations(), sources[1:], MAX_PRODUCTS)))
    assert num_parts >= (30 if variant == "nougat" else 2)
    num_rows = [cluster.encoder.body.num_rows(each) for each in sources]
    stream, other = (
        reader(cluster.reading, seq_id, 3, max_tokens, seq_id, num_rows[seq_id - 1], data=sources[seq_id - 1])
        for seq_id, max_tokens in ((1, 60), (2, 4))
    )
    cluster.scheduler.add(stream)
    while not stream.output_token_ids:
        cluster.step()
    cluster.scheduler.add(other)
    for number in range(num_parts):
        assert not cluster.runs.has(other.features[0].resource), f"part {number} of {num_parts} has not run"
        num_tokens = len(stream.output_token_ids)
        cluster.step()
        assert len(stream.output_token_ids) == num_tokens + 1
    cluster.step()
    for sequence, source in zip((stream, other), sources, strict=True):
        found = cluster.runs._outputs[sequence.features[0].inputs[0].hash].encoded.rows
        torch.testing.assert_close(found, true_rows(truth, source), rtol=1e-4, atol=1e-4)
    cluster.run_until_idle()
    assert [each.output_token_ids for each in (stream, other)] == [expected_output(each) for each in (stream, other)]


def test_no_part_of_a_page_has_many_more_products_than_it_may(tmp_path: Path) -> None:
    path = make_encoder_decoder(tmp_path, "nougat")
    truth, encoder = load_true_encoder_decoder(path), WholeModel(path).weights.encoder
    parts, counts = encoder.body.parts(TorchOperations(), [random_source(truth, 0, seed=1)], MAX_PRODUCTS), []
    with torch.inference_mode():
        while not counts or counts[-1] is not None:
            with FlopCounterMode(display=False) as counter:
                has_ended = next(parts, parts) is parts
            counts.append(None if has_ended else counter.get_total_flops() // 2)
    counts = counts[1:-1]  # the first part embeds all patches, which is little
    largest_window = 9 * 32 * (4 * 32 + 2 * 9)  # one window of the last stage, which is never cut
    assert max(counts) <= max(MAX_PRODUCTS, largest_window)
    assert sum(counts) > 10 * max(counts), "the page is cut"


@pytest.mark.parametrize("variant", ["nougat", "whisper", "t5", "blip2_t5"])
def test_the_largest_input_with_which_a_gpu_is_warmed_up_can_be_read(variant: str, tmp_path: Path) -> None:
    make = make_vision_model if variant in WITH_ENCODERS else make_encoder_decoder
    path = make(tmp_path, variant)
    config, pixels = load_model_config(path).encoder, PixelScale(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert config is not None
    runnable = RunnableEncoder(WholeModel(path).weights.encoder, pixels, torch.float32, torch.device("cpu"))
    example = runnable_encoder.example_input(config, 16)
    assert runnable.size(example) > 0
    run, encoded = runnable.begin([example]), None
    while encoded is None:
        encoded = run.advance()
    assert [len(each.rows) for each in encoded] == [example.num_rows]
