"""With `dense.deterministic` on a CPU a row has the same bits in every step: products, activations, whole models."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from services.common.families.shape import Activation
from services.dense_worker.batch_invariant.torch_operations import BatchInvariantTorchOperations
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Cut, Linear, PlainWeight, Projection
from services.dense_worker.kernels.lora.torch_lora import TorchLora
from services.dense_worker.model.operations import Residual
from services.dense_worker.parameters import Parameter, parts_of_type
from services.lora.checkpoint import LoraTensors
from tests.support.dense.family_models import make_family_model
from tests.support.dense.random_steps import RandomSteps, compute_alone, deterministic_model, differing_rows
from tests.support.dense.whole_model import WholeModel
from tests.support.models import make_model_dir

torch.set_num_threads(1)
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
NUM_ROWS = 70


def make_linear(in_features: int, out_features: int, dtype: torch.dtype) -> Linear:
    matrix = Parameter("w", torch.randn(out_features, in_features).to(dtype), ())
    return Linear(
        "gate_up", in_features, out_features, (Projection("p", out_features),), Cut.OUT, PlainWeight(matrix), None
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(96, 200), (72, 100), (640, 256)])
def test_rows_of_products_and_activations_have_the_same_bits_in_every_batch(
    dtype: torch.dtype, size: tuple[int, int]
) -> None:
    operations, linear = BatchInvariantTorchOperations(), make_linear(*size, dtype)
    x, draw = torch.randn(NUM_ROWS, size[0]).to(dtype), random.Random(2)
    for function in (Activation.SILU, Activation.GELU_TANH, Activation.GELU):
        activation = MlpActivation(function, is_gated=True)

        def run(rows: list[int], activation: MlpActivation = activation) -> torch.Tensor:
            return operations.norm_activate(Residual(x[rows]), None, linear, activation)[1].float()

        alone = torch.cat([run([row]) for row in range(NUM_ROWS)])
        for _ in range(10):
            rows = draw.sample(range(NUM_ROWS), draw.randint(1, NUM_ROWS))
            assert differing_rows(run(rows), alone[rows]) == 0


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [("qwen3_moe", torch.float32), ("gemma2", torch.bfloat16), ("gpt_oss", torch.bfloat16)],
)
def test_logits_of_a_text_are_the_same_in_every_step(tmp_path: Path, variant: str, dtype: torch.dtype) -> None:
    """Beside other texts, in chunks, behind a cached prefix, after a fork and after a lost step."""
    path, draw = make_family_model(tmp_path, variant), random.Random(4)
    prefix = [draw.randrange(96) for _ in range(20)]
    all_token_ids = [
        [*prefix[:shared], *(draw.randrange(96) for _ in range(length))] for shared, length in ((20, 14), (9, 61))
    ]
    texts = [compute_alone(deterministic_model(path, dtype), token_ids) for token_ids in all_token_ids]
    steps = RandomSteps(deterministic_model(path, dtype), texts)
    for logits, expected in steps.run(num_steps=7):
        assert differing_rows(logits, expected) == 0
    assert steps.num_computed > 50
    assert steps.num_cached > 0


def test_a_row_with_an_adapter_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, "llama", num_hidden_layers=1)
    weights = WholeModel(path).weights
    linears = list(parts_of_type(Linear, weights.layers))
    lora = TorchLora(linears, 2, torch.float32, CPU, row_by_row=True)
    linear = linears[0]
    projection = linear.merged_from[0]
    for slot in range(2):
        a, b = torch.randn(8, linear.in_features), torch.randn(projection.out_features, 8)
        tensors = LoraTensors(a.numpy(), b.numpy(), 0.5)
        lora.store(slot, {projection.name: tensors})
    operations, x = BatchInvariantTorchOperations(lora), torch.randn(40, linear.in_features)

    def run(slots: list[int], rows: list[int]) -> torch.Tensor:
        lora.begin_step(torch.tensor([slots[row] for row in rows]).numpy())
        return operations.linear(linear, x[rows])

    draw = random.Random(1)
    slots = [draw.choice((-1, 0, 1)) for _ in range(40)]
    alone = torch.cat([run(slots, [row]) for row in range(40)])
    for _ in range(10):
        rows = draw.sample(range(40), draw.randint(1, 40))
        assert differing_rows(run(slots, rows), alone[rows]) == 0
