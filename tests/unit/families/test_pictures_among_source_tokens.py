"""BLIP-2 with Flan-T5: the encoder's output for tokens and pictures, compared with transformers on the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from services.common.model_config import load_model_config
from services.dense_worker.encoders.source.picture_tokens import SourceTokens
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.model.torch_operations import TorchOperations
from services.dense_worker.model.weights import load_weights
from tests.support.dense.encoder_output import output_of
from tests.support.dense.vision_models import IMAGE_TOKEN_ID, load_true_model, make_vision_model, noise, true_pixels

torch.set_num_threads(1)
BOUND = 5e-5  # relative to the largest number: both compute in float32, in another order of sums
TEXTS = [[9, 10, 11], [12, 13, 14, 15, 16, 17, 18], [19, 20]]
IMAGES = [[noise(30, 43, 1), noise(60, 20, 2)], [], [noise(60, 20, 3)]]  # before each text


@torch.inference_mode()
def test_rows_of_several_inputs(tmp_path: Path) -> None:
    path = make_vision_model(tmp_path, "blip2_t5")
    truth, config = load_true_model(path, "blip2_t5"), load_model_config(path)
    assert config.encoder is not None and config.encoder.pictures is not None
    layout, inputs, expected = config.encoder.pictures.layout, [], []
    for text, images in zip(TEXTS, IMAGES, strict=True):
        shapes = [layout.shape_of(each.height, each.width, is_low=False) for each in images]
        ids = torch.tensor([IMAGE_TOKEN_ID] * sum(shape.num_tokens for shape in shapes) + text)
        pictures = []
        for image, shape in zip(images, shapes, strict=True):
            tiles = np.stack([np.asarray(tile) for tile in layout.tiles_of(image, shape)])
            pictures.append(Picture(image.tobytes()[:32].hex(), shape, torch.from_numpy(tiles)))
        inputs.append(SourceTokens(ids, tuple(pictures)))
        if images:
            output = truth(
                input_ids=ids[None], decoder_input_ids=torch.tensor([[0]]), **true_pixels("blip2_t5", images)
            )
            expected.append(output.language_model_outputs.encoder_last_hidden_state[0])
        else:
            expected.append(truth.language_model.encoder(input_ids=ids[None]).last_hidden_state[0])
    body = load_weights(path, config, torch.float32, torch.device("cpu")).encoder.body
    found = output_of(body, inputs)
    num_layers = [len(each.layers) for each in (body.tower.encoder, body.tower, body.inner)]
    assert len(list(body.parts(TorchOperations(), inputs, 2**40))) == sum(num_layers), "steps can run after each layer"
    assert len(found) == sum(map(body.num_rows, inputs))
    assert (found - torch.cat(expected)).abs().max() <= BOUND * torch.cat(expected).abs().max()


def test_without_a_processor_the_text_part_alone_is_served(tmp_path: Path) -> None:
    path = make_vision_model(tmp_path, "blip2_t5")
    (path / "preprocessor_config.json").unlink()
    config = load_model_config(path)
    assert config.encoder is not None and config.encoder.pictures is None
    names = [name for name, _ in load_weights(path, config, torch.float32, torch.device("cpu")).named_parameters()]
    assert names and not [name for name in names if "tower" in name]
