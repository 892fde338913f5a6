"""Rows of sound, of which an encoder's layers make sums and norms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.dense.encoder_decoder_models import load_true_encoder_decoder, make_encoder_decoder, random_source
from tests.support.dense.whole_model import WholeModel

torch.set_num_threads(1)


@pytest.mark.parametrize("num_inputs", [1, 2])
def test_rows_of_sound_lie_one_after_another(num_inputs: int, tmp_path: Path) -> None:
    """The sums of all layers would take after them, and then norms would copy each."""
    path = make_encoder_decoder(tmp_path, "whisper")
    truth, body = load_true_encoder_decoder(path), WholeModel(path).weights.encoder.body
    with torch.inference_mode():
        assert body.rows.forward([random_source(truth, 9, seed=seed) for seed in range(num_inputs)]).is_contiguous()
