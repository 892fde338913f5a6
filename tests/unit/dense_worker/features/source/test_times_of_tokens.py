"""Times of tokens of a whole Whisper in one process, beside those that transformers finds while it generates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from services.dense_worker.features.source.alignment import Alignment
from services.dense_worker.model.torch_operations import TorchOperations
from services.gateway.sound.word_times import token_steps
from services.pb import source_pb2
from tests.support.dense.encoder_output import output_of
from tests.support.dense.whole_model import WholeModel
from tests.support.speech import ALIGNMENT_HEADS, ENGLISH, RATE, START, TRANSCRIBE, make_speech_model, sound_of

PROMPT = [START, ENGLISH, TRANSCRIBE]


def true_times(path: Path, sound: np.ndarray) -> tuple[torch.Tensor, list[int], list[float]]:
    """The features of a sound, the tokens that the model writes of it, and their times."""
    model = WhisperForConditionalGeneration.from_pretrained(path, attn_implementation="eager").eval()
    extractor = WhisperFeatureExtractor.from_pretrained(path)
    found = extractor(sound[:, 0], sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
    with torch.inference_mode():
        output = model.generate(
            found.input_features,
            attention_mask=found.attention_mask,
            return_timestamps=True,
            return_token_timestamps=True,
            return_segments=True,
            task="transcribe",
            language="en",
            max_new_tokens=40,
        )
    whole = output["segments"][0][0]["result"]
    assert whole["sequences"][: len(PROMPT)].tolist() == PROMPT
    times = whole["token_timestamps"][len(PROMPT) :].tolist()
    return found.input_features[0], whole["sequences"][len(PROMPT) :].tolist(), times


@pytest.mark.parametrize(("seconds", "seed"), [(1.0, 5), (1.0, 6), (1.0, 7)])
def test_times_of_tokens_are_those_of_transformers(seconds: float, seed: int, tmp_path: Path) -> None:
    path = make_speech_model(tmp_path)
    source, token_ids, times = true_times(path, sound_of(seconds, seed=seed))
    model, tokens = WholeModel(path), [*PROMPT, *token_ids[:-1]]
    layers = {layer: model.config.attention.layer_heads[layer] for layer in model.config.cross_layers}
    heads = [source_pb2.AlignmentHead(layer=layer, head=head) for layer, head in ALIGNMENT_HEADS]
    request = source_pb2.Alignment(first_token=len(PROMPT), num_rows=round(50 * seconds), heads=heads, filter_width=7)
    alignment, operations = Alignment(request, len(tokens), layers, None), TorchOperations()
    encoder, answers, position = model.weights.encoder, [], 0
    with torch.inference_mode():
        output = output_of(encoder.body, [source])
        for layer, rows in zip(layers, encoder.keys_and_values(operations, output), strict=True):
            if layer in alignment.layers:
                alignment.take_keys(layer, rows)
    forward = model.attention.forward

    def watch(layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        if layer in layers:
            size = layers[layer].q_size
            answers.append(alignment.take_queries(layer, qkv.reshape(-1)[: len(qkv) * size].view(-1, size), position))
        forward(layer, qkv, out)

    model.attention.forward = watch
    model.open(1, tokens, source=source)
    model.step((1, 7, 0))
    position = 7
    model.step((1, len(tokens) - 7, 7))
    [weights] = [each for each in answers if each is not None]
    steps = token_steps(weights.numpy())
    assert (0.02 * steps).tolist() == pytest.approx(times[:-1], abs=0.001)
    assert len(set(times)) > 3, "the times tell tokens apart"
