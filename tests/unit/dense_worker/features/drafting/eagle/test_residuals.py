"""The residual that a segment returns is what transformers calls the hidden state before a layer, in all families."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.dense_worker.runner.model_runner import LayerRun
from services.dense_worker.runner.step_hook import KeptResiduals
from tests.support.dense.family_models import VARIANTS, load_true_model, make_family_model
from tests.support.dense.whole_model import WholeModel

torch.set_num_threads(1)
TEXT = [5, 9, 17, 3, 44, 45, 46, 20, 21, 22, 23]
BOUND = 2e-5  # relative to the greatest value: other orders of summation in float32


class Attending:
    """A `Channel` whose other end attends at once."""

    def __init__(self, model: WholeModel) -> None:
        self._model, self._layer = model, 0
        self.qkv = torch.zeros(len(TEXT), model.config.qkv_size)
        self.attn_out = torch.zeros(len(TEXT), model.config.attn_size)

    def begin_step(self, step_id: int, num_rows: int) -> None: ...
    def begin_layers(self, num_rows: int) -> None: ...
    def signal(self, flag: int) -> None: ...

    def wait(self, flag: int) -> None:
        self._model.attention.forward(self._layer, self.qkv, self.attn_out)
        self._layer += 1

    def fetch_attn_out(self, num_tokens: int) -> torch.Tensor:
        return self.attn_out[:num_tokens]


# transformers keeps what is behind a layer of Mamba, where no step has drafts.
MAMBA = ("mamba", "mamba2", "falcon_mamba")


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant not in MAMBA])
@torch.inference_mode()
def test_residuals_are_the_hidden_states_of_transformers(tmp_path: Path, variant: str) -> None:
    path = make_family_model(tmp_path, variant)
    model = WholeModel(path)
    num_layers = model.config.num_layers
    layers = [*reversed(range(num_layers)), 1]
    kept = KeptResiduals(layers, torch.zeros(len(TEXT) + 3, len(layers), model.config.hidden_size))
    model.open(1, TEXT)
    planned, token_ids, _ = model.prepare([(1, len(TEXT), 0)], ())
    model.attention.begin_step(planned.metadata)
    channel: object = Attending(model)
    rows = torch.tensor([len(TEXT) - 1])
    run = LayerRun(model.dense, channel, num_layers, kept)  # type: ignore[arg-type]
    run.begin(torch.tensor(token_ids))
    run.finish(rows)
    truth = load_true_model(path)(torch.tensor([TEXT]), output_hidden_states=True, use_cache=False).hidden_states
    for place, layer in enumerate(layers):
        blocks = model.config.parts.blocks  # which transformers calls layers
        expected = truth[blocks[layer][0] if blocks else layer][0]
        assert (kept.memory[: len(TEXT), place] - expected).abs().max() <= BOUND * expected.abs().max(), layer
    assert not kept.memory[len(TEXT) :].any(), "rows beyond the step stay as they are"
