"""What does not run on several ranks is refused by name, with what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.common.config import EMBEDDED_MODEL, load_config
from services.common.errors import ConfigError
from services.common.model_config import ModelConfig, load_model_config
from services.common.rank import Rank, seam_config
from services.common.several_ranks import check_ranks


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return load_model_config(EMBEDDED_MODEL)


REFUSED = {
    'dense.backend="tensorrt"': "TensorRT adds up over no ranks: set dense.backend to torch",
    "dense.deterministic=true": "dense.deterministic is true, and sums over ranks have another order: set it to false",
    "dense.max_loras=2": "dense.max_loras is 2, and adapters are not cut: set it to 0",
    "gateway.enable_prompt_embeds=true": "gateway.enable_prompt_embeds is on, and only the first rank would have them",
    "attention.host_kv_bytes=1000": "attention.host_kv_bytes is 1000, a tier for one cache: set it to 0",
    'attention.kv_events="tcp://*:5557"': "attention.kv_events is 'tcp://*:5557', and the events are of one cache",
    'launch.services=["dense_worker"]': "launch.services is dense_worker: one launcher must start all services",
    'launch.standby_dense="loaded"': "launch.standby_dense is 'loaded': set it to off: ranks have no standbys",
}


@pytest.mark.parametrize(("setting", "message"), REFUSED.items())
def test_settings(model: ModelConfig, setting: str, message: str) -> None:
    check_ranks(load_config(None, [setting]), model)  # one rank can
    with pytest.raises(ConfigError) as caught:
        check_ranks(load_config(None, [setting, "dense.tensor_parallel_size=2"]), model)
    assert str(caught.value).startswith(f"dense.tensor_parallel_size is 2, but {message}")


def test_numbers_that_do_not_divide_name_those_that_would(model: ModelConfig) -> None:
    with pytest.raises(
        ConfigError, match=rf"size is 3, but 'llama' has {model.num_heads} heads: set it to 1 or 2 or 4"
    ):
        check_ranks(load_config(None, ["dense.tensor_parallel_size=3"]), model)


def test_keys_that_cannot_be_shared_equally(model: ModelConfig) -> None:
    odd: dict[str, Any] = {"num_heads": 12, "num_kv_heads": 3, "intermediate_size": 48}
    with pytest.raises(ConfigError, match="has 3 key-value heads: set it to 1 or 3 or 6 or 12"):
        check_ranks(load_config(None, ["dense.tensor_parallel_size=2"]), replace(model, **odd))


def test_a_rank_has_its_heads_and_shares_those_of_keys(model: ModelConfig) -> None:
    shape = replace(model, num_heads=8, num_kv_heads=2, head_dim=4)
    assert [seam_config(shape, Rank(index, 4)).num_heads for index in range(4)] == [2, 2, 2, 2]
    assert [seam_config(shape, Rank(index, 4)).num_kv_heads for index in range(4)] == [1, 1, 1, 1]
    assert [Rank(index, 4).share(2 * 4, 4) for index in range(4)] == [range(4), range(4), range(4, 8), range(4, 8)]
    assert seam_config(shape, Rank(0, 1)) is shape
