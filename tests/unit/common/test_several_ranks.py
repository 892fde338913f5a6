"""What does not run on several ranks is refused by name, with what to do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.config import EMBEDDED_MODEL, load_config
from services.common.errors import ConfigError
from services.common.families.shape import AttentionOptions, LayerHeads
from services.common.model_config import ModelConfig, load_model_config
from services.common.rank import Rank, seam_config
from services.common.several_ranks import check_ranks


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return load_model_config(EMBEDDED_MODEL)


def _with_kv_layers(*kv_layers: int | None) -> AttentionOptions:
    return AttentionOptions(layer_heads=tuple(LayerHeads(4, 4, 16, kv_layer=each) for each in kv_layers))


REFUSED = {
    'dense.backend="tensorrt"': "TensorRT has neither sums over ranks nor stages: set dense.backend to torch",
    "dense.deterministic=true": "dense.deterministic is true, and ranks have other kernels: set it to false",
    'launch.services=["dense_worker"]': "launch.services is dense_worker: one launcher must start all services",
    'launch.standby_dense="imports"': (
        "launch.standby_dense is 'imports', and a shard's standby has its weights: set it to auto or loaded"
    ),
}


@pytest.mark.parametrize("ranks", ["dense.tensor_parallel_size", "dense.pipeline_parallel_size"])
@pytest.mark.parametrize(("setting", "message"), REFUSED.items())
def test_settings(model: ModelConfig, setting: str, message: str, ranks: str) -> None:
    check_ranks(load_config(None, [setting]), model)  # one rank can
    with pytest.raises(ConfigError) as caught:
        check_ranks(load_config(None, [setting, f"{ranks}=2"]), model)
    assert str(caught.value).startswith(f"{ranks} is 2, but {message}")


def test_both_kinds_of_ranks_at_once(model: ModelConfig) -> None:
    both = ["dense.tensor_parallel_size=2", "dense.pipeline_parallel_size=3"]
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2 and dense\.pipeline_parallel_size 3: set one of"):
        check_ranks(load_config(None, both), model)


@pytest.mark.parametrize("ranks", ["dense.tensor_parallel_size", "dense.pipeline_parallel_size"])
@pytest.mark.parametrize("part", ["layer_inputs", "encoder"])
def test_parts_that_only_one_rank_can_have(model: ModelConfig, ranks: str, part: str) -> None:
    is_encoder = part == "encoder"
    found: Any = SimpleNamespace()
    changes: dict[str, Any] = {"encoder": found} if is_encoder else {"parts": replace(model.parts, layer_inputs=found)}
    with pytest.raises(ConfigError, match=rf"{ranks} is 2, but 'llama' has (an encoder|inputs).*: set it to 1$"):
        check_ranks(load_config(None, [f"{ranks}=2"]), replace(model, **changes))


def test_numbers_that_do_not_divide_name_those_that_would(model: ModelConfig) -> None:
    with pytest.raises(
        ConfigError, match=rf"size is 3, but 'llama' has {model.num_heads} heads: set it to 1 or 2 or 4"
    ):
        check_ranks(load_config(None, ["dense.tensor_parallel_size=3"]), model)


def test_keys_that_cannot_be_shared_equally(model: ModelConfig) -> None:
    odd: dict[str, Any] = {"num_heads": 12, "num_kv_heads": 3, "intermediate_size": 48}
    with pytest.raises(ConfigError, match="has 3 key-value heads: set it to 1 or 3 or 6 or 12"):
        check_ranks(load_config(None, ["dense.tensor_parallel_size=2"]), replace(model, **odd))


@pytest.mark.parametrize(
    ("changes", "count", "message"),
    [
        ({}, 9, r"9, but 'llama' has 8 layers: set it to 1 or 2 or 3 or 4 or 5 or 6 or 7 or 8$"),
        # The last of them is the one layer that reads all keys.
        (
            {"sliding_windows": (16,) * 7 + (None,)},
            2,
            r"2, but .* has no layer without a window in stage 0, layers 0 to 3, .* the same blocks: set it to 1$",
        ),
        ({"sliding_windows": (16, None) * 4}, 5, "5, but .* in stage 2, layers 4 to 4.*: set it to 1 or 2 or 3 or 4$"),
        (
            {"attention": _with_kv_layers(None, None, None, 0, None, None, None, None)},
            4,
            r"4, but 'llama' has keys in layer 0 that layer 3 reads, which is in another stage: set it to 1 or 2$",
        ),
    ],
)
def test_stages_that_cannot_be(model: ModelConfig, changes: dict[str, Any], count: int, message: str) -> None:
    shape: dict[str, Any] = {"num_layers": 8, "sliding_windows": (None,) * 8}
    with pytest.raises(ConfigError, match=f"dense.pipeline_parallel_size is {message}"):
        check_ranks(load_config(None, [f"dense.pipeline_parallel_size={count}"]), replace(model, **shape | changes))


def test_layers_that_differ_stay_with_their_stage(model: ModelConfig) -> None:
    shape = replace(
        model,
        num_layers=5,
        sliding_windows=(None, 4, None, 8, None),
        attention=_with_kv_layers(None, None, None, None, 3),
    )
    first, second = (seam_config(shape, Rank(index, 2, is_stage=True)) for index in range(2))
    assert (first.num_layers, first.sliding_windows) == (3, (None, 4, None))
    assert (second.num_layers, second.sliding_windows) == (2, (8, None))
    assert [heads.kv_layer for heads in second.layer_heads] == [None, 0]
    assert (first.num_heads, second.num_heads) == (model.num_heads,) * 2


def test_a_rank_has_its_heads_and_shares_those_of_keys(model: ModelConfig) -> None:
    shape = replace(model, num_heads=8, num_kv_heads=2, head_dim=4)
    assert [seam_config(shape, Rank(index, 4)).num_heads for index in range(4)] == [2, 2, 2, 2]
    assert [seam_config(shape, Rank(index, 4)).num_kv_heads for index in range(4)] == [1, 1, 1, 1]
    assert [Rank(index, 4).share(2 * 4, 4) for index in range(4)] == [range(4), range(4), range(4, 8), range(4, 8)]
    assert seam_config(shape, Rank(0, 1)) is shape
