"""Settings and checkpoints that do not go together with an encoder are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.common.config import load_config
from services.common.errors import ConfigError
from services.dense_worker.build import resolve_dense_model

# Fields of a T5; the weights are not read.
T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}


def resolve(path: Path, *settings: str, **fields: object) -> None:
    (path / "config.json").write_text(json.dumps(T5 | fields))
    resolve_dense_model(load_config(None, [f"model.path={path}", "dense.device=cpu", *settings]))


def test_the_defaults_go_together_with_an_encoder(tmp_path: Path) -> None:
    resolve(tmp_path)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("scheduler.speculation=ngram", "scheduler.speculation is 'ngram', .* encoder of 't5': set it to off"),
        ("dense.max_loras=2", "dense.max_loras is 2, .* encoder of 't5': set it to 0"),
        ("dense.quantization=fp8", "dense.quantization is 'fp8', .* encoder of 't5': set it to checkpoint"),
        ("attention.workers=2", "attention.workers is 2, but 't5' has an encoder, .*: set attention.workers to 1"),
        ('attention.addresses=["a:1", "b:1"]', "attention.addresses names 2, but 't5' has an encoder"),
        ('attention.addresses=["a:1"]', "attention.addresses"),
        ("gateway.enable_prompt_embeds=true", "gateway.enable_prompt_embeds is True, .* of 't5': set it to False"),
    ],
)
def test_what_does_not_go_together_with_an_encoder_is_refused(tmp_path: Path, setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(tmp_path, setting)


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    with pytest.raises(ConfigError, match=r"the checkpoint is quantized \(awq\), .* not supported for 't5'"):
        resolve(tmp_path, quantization_config=quantization)
