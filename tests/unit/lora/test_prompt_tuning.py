"""Virtual tokens of PEFT's checkpoints; those that are damaged or of another model are refused with what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.common.errors import InvalidRequest
from services.lora.prompt_embeds import PromptEmbeds, make_prompt_embeds
from services.lora.prompt_tuning import read_virtual_tokens
from tests.support.prompt_vectors import make_prompt_tuning

HIDDEN_SIZE = 8
VECTORS = torch.randn(3, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))


def read(path: Path) -> PromptEmbeds | None:
    config, weights = path / "adapter_config.json", path / "adapter_model.safetensors"
    return read_virtual_tokens(config.read_bytes(), weights, HIDDEN_SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "P_TUNING"])
def test_virtual_tokens_are_the_rows_of_the_checkpoint(tmp_path: Path, dtype: torch.dtype, kind: str) -> None:
    vectors = VECTORS.to(dtype)
    table = read(make_prompt_tuning(tmp_path / "a", vectors, peft_type=kind))
    assert table is not None
    found = torch.frombuffer(bytearray(table.values), dtype=getattr(torch, table.dtype)).view(3, HIDDEN_SIZE)
    assert found.dtype == dtype and torch.equal(found, vectors)
    assert list(table.token_ids(100)) == [100, 101, 102]


def test_another_kind_of_adapter_is_left_to_others(tmp_path: Path) -> None:
    assert read(make_prompt_tuning(tmp_path / "a", VECTORS, peft_type="LORA")) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_virtual_tokens": 2}, r"shape \[3, 8\], .* call for \[2, 8\]"),
        ({"num_virtual_tokens": 0}, "num_virtual_tokens 0, must be from 1 to 8192"),
        ({"num_virtual_tokens": 9000}, "num_virtual_tokens 9000, must be from 1 to 8192"),
        ({"num_virtual_tokens": "3"}, "num_virtual_tokens '3', must be"),
        ({"num_virtual_tokens": True}, "num_virtual_tokens true, must be"),
        ({"num_transformer_submodules": 2}, "num_transformer_submodules 2, supported: 1"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "task_type 'SEQ_2_SEQ_LM', supported: 'CAUSAL_LM'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read(make_prompt_tuning(tmp_path / "a", VECTORS, **config))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"prompt_embeddings": VECTORS[:, :4].contiguous()}, r"has shape \[3, 4\], .* call for \[3, 8\]"),
        ({"prompt_embeddings": VECTORS, "other": VECTORS + 1}, r'expected \["prompt_embeddings"\]'),
        ({"other": VECTORS}, r'has \["other"\], expected'),
        ({"prompt_embeddings": VECTORS.double()}, "dtype 'F64', supported: F32, F16, BF16"),
        ({"prompt_embeddings": VECTORS / 0}, "not finite"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], words: str) -> None:
    path = make_prompt_tuning(tmp_path / "a", VECTORS)
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(InvalidRequest, match=words):
        read(path)


def test_files_that_are_missing_or_no_json_are_refused(tmp_path: Path) -> None:
    path = make_prompt_tuning(tmp_path / "a", VECTORS)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match=r"adapter_model.safetensors cannot be read: No such file"):
        read(path)
    (path / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(InvalidRequest, match="holds a JSON list"):
        read(path)


def test_tables_are_equal_if_their_hashes_are() -> None:
    values = VECTORS.numpy().tobytes()
    tables = [
        make_prompt_embeds(values, 3, 8, "float32", "x"),
        make_prompt_embeds(values, 6, 4, "float32", "x"),
        make_prompt_embeds(values, 6, 8, "float16", "x"),
        make_prompt_embeds(bytes(len(values)), 3, 8, "float32", "x"),
    ]
    assert len({table.hash for table in tables}) == len(tables)
    assert make_prompt_embeds(bytes(bytearray(values)), 3, 8, "float32", "y").hash == tables[0].hash
