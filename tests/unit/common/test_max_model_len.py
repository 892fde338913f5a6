"""A length of `model.max_model_len` that the workers would refuse ends the start before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.common.config import load_config
from services.common.errors import ConfigError, ModelError
from services.common.max_model_len import check_before_start
from tests.support.cluster import free_port
from tests.support.warm_process import run_warm
from tests.unit.common.test_streaming import write_config

SCALED = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("fields", "settings", "is_allowed"),
    [
        ({}, [], True),
        ({}, ["model.max_model_len=64"], True),
        ({}, ["model.max_model_len=65"], False),
        ({"rope_parameters": SCALED}, ["model.max_model_len=65"], True),
        ({}, ["model.max_model_len=65", "attention.window=32", "attention.sink_tokens=4"], True),
    ],
    ids=str,
)
def test_only_a_length_without_positions_is_refused(
    tmp_path: Path, fields: dict[str, Any], settings: list[str], is_allowed: bool
) -> None:
    path = write_config(tmp_path, "llama", max_position_embeddings=64, **fields)
    config = load_config(None, [f"model.path={path}", *settings])
    if is_allowed:
        check_before_start(config)
        return
    with pytest.raises(ConfigError, match=r"is 65, the model's positions end at 64 .*: set it to 64 or less"):
        check_before_start(config)


@pytest.mark.parametrize(
    ("kind", "fields", "most"),
    [("bert", {}, 64), ("roberta", {"pad_token_id": 1}, 62), ("mpnet", {"pad_token_id": 1}, 62)],
)
def test_an_encoder_has_its_own_limit(tmp_path: Path, kind: str, fields: dict[str, Any], most: int) -> None:
    """Positions of some begin behind that of padding, so that the first rows of the table belong to no token."""
    path = write_config(tmp_path, kind, max_position_embeddings=64, vocab_size=99, num_attention_heads=2, **fields)
    check_before_start(load_config(None, [f"model.path={path}", f"model.max_model_len={most}"]))
    with pytest.raises(ConfigError, match=f"is {most + 1}, the model's positions end at {most}: set it to {most} or"):
        check_before_start(load_config(None, [f"model.path={path}", f"model.max_model_len={most + 1}"]))


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        check_before_start(load_config(None, [f"model.path={tmp_path}"]))


def test_the_start_ends_before_a_service_is_started() -> None:
    ports = [f"--set={key}=127.0.0.1:{free_port()}" for key in ("gateway.address", "gateway.http_address")]
    done = run_warm("services.launch", "--max-model-len", "99999", *ports)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "model.max_model_len is 99999" in line and "service=launch" in line
