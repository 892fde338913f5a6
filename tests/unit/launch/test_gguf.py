"""Models in GGUF files become those that Hugging Face has, or are refused by the name of what is not read."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from services.common.errors import CapacityError, ConfigError, ModelError
from services.common.model_config import load_model_config
from services.launch import convert_gguf, gguf
from services.launch.arguments import parse_args
from services.launch.convert_gguf import convert, main
from services.launch.hub import is_hub_name
from tests.support.gguf_files import dequantized, write_gguf
from tests.support.models import make_model_dir

SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_attention_heads": 4}


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_weight_is_the_original_one_in_its_place(family: str, tmp_path: Path) -> None:
    model = make_model_dir(tmp_path / "hf", family, num_key_value_heads=2, **SIZES)
    written = write_gguf(tmp_path / "m.gguf", model, "F32")
    convert(tmp_path / "m.gguf", tmp_path / "made")
    found = weights_of(tmp_path / "made")
    assert found.keys() == written.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in written.items())
    load_model_config(tmp_path / "made", None)
    input_ids = torch.tensor([[5, 9, 300, 2]]) % 256
    logits = [
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)(input_ids).logits
        for each in (model, tmp_path / "made")
    ]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F16", "float16"), ("BF16", "bfloat16"), *((f"Q{each}", "float16") for each in ("8_0", "4_0", "5_1"))],
)
def test_quantized_tensors_are_those_that_the_library_dequantizes(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_gguf, "SHARD_BYTES", 100_000)
    model = make_model_dir(tmp_path / "hf", "llama", **SIZES)
    written = write_gguf(tmp_path / "m.gguf", model, kind)
    convert(tmp_path / "m.gguf", tmp_path / "made")
    found = weights_of(tmp_path / "made")
    assert json.loads((tmp_path / "made" / "config.json").read_text())["dtype"] == dtype
    assert len(list((tmp_path / "made").glob("*.safetensors"))) > 1
    for name, tensor in written.items():
        expected = tensor if tensor.ndim == 1 else dequantized(tensor, kind).to(getattr(torch, dtype))
        assert torch.equal(found[name], expected), name


def test_the_tokenizer_and_the_chat_template_are_the_files_own(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", EMBEDDED_MODEL, "Q8_0")
    convert(tmp_path / "m.gguf", tmp_path / "made")
    made, original = (AutoTokenizer.from_pretrained(each) for each in (tmp_path / "made", EMBEDDED_MODEL))
    for text in ("San Francisco is a", "What is 7 + 5?\n  你好", "<|user|> hi"):
        assert made.encode(text) == original.encode(text)
    chat = [{"role": "user", "content": "Hello"}]
    assert made.apply_chat_template(chat, tokenize=False) == original.apply_chat_template(chat, tokenize=False)
    assert (made.bos_token, made.eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("gemma2", {}, "architecture 'gemma2', GGUF is read of llama, qwen2, qwen3"),
        ("llama", {"keys": {"rope.scaling.type": "yarn"}}, "llama.rope.scaling.type = yarn"),
        ("llama", {"keys": {"expert_count": 8}}, "llama.expert_count = 8"),
        ("llama", {"keys": {"rope.dimension_count": 16}}, "rotates 16 of 32 numbers"),
        ("llama", {"extra": "rope_freqs.weight"}, "the tensor rope_freqs.weight"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    family: str, options: dict[str, object], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model_dir(tmp_path / "hf", "llama", **SIZES)
    if family != "llama":
        config = json.loads((model / "config.json").read_text()) | {"model_type": family}
        (model / "config.json").write_text(json.dumps(config))
    write_gguf(tmp_path / "m.gguf", model, "F16", **options)
    assert main(tmp_path / "m.gguf", tmp_path / "made") == 1
    printed = capsys.readouterr().out
    assert named in printed and printed.count("\n") == 1
    assert not (tmp_path / "made").exists()


def test_a_type_that_is_not_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf", make_model_dir(tmp_path / "hf", "llama", **SIZES), "Q8_0")
    monkeypatch.setattr(convert_gguf, "QUANTIZED", ())
    with pytest.raises(ModelError, match=r"\.weight in Q8_0, read are F32, F16, BF16$"):
        convert(tmp_path / "m.gguf", tmp_path / "made")


@pytest.mark.parametrize("num_bytes", [0, 3, 900, 60_000, -1])
def test_half_a_file_is_called_damaged(num_bytes: int, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, make_model_dir(tmp_path / "hf", "llama", **SIZES), "F16")
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match=f"{file} is truncated"):
        convert(file, tmp_path / "made")


def test_a_disk_without_room_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_gguf(tmp_path / "m.gguf", EMBEDDED_MODEL, "Q8_0")
    needed = sum(tensor.numel() * (4 if tensor.ndim == 1 else 2) for tensor in written.values())
    monkeypatch.setattr(convert_gguf.shutil, "disk_usage", lambda path: type("Usage", (), {"free": needed - 1}))
    with pytest.raises(CapacityError, match=f"takes {needed} bytes as safetensors, {tmp_path} has {needed - 1} left"):
        convert(tmp_path / "m.gguf", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_start_converts_a_file_once_and_its_change_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_convert", convert)  # in this process, which has imported torch
    monkeypatch.setattr(gguf.convert_model, "__defaults__", (tmp_path / "cache",))
    file = tmp_path / "tiny.gguf"
    write_gguf(file, EMBEDDED_MODEL, "Q8_0")
    config, _ = parse_args([str(file)])
    assert config.model.name == "tiny" and config.model.path.parent == tmp_path / "cache"
    made = (config.model.path / "config.json").stat().st_mtime_ns
    assert parse_args([str(file)])[0].model.path == config.model.path
    assert (config.model.path / "config.json").stat().st_mtime_ns == made
    shutil.copy(file, other := tmp_path / "other.gguf")
    file.write_bytes(other.read_bytes())
    os.utime(file, ns=(1, 1))
    assert parse_args([str(file)])[0].model.path != config.model.path
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_start_says_in_one_sentence_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"nothing\.gguf is not a file"):
        gguf.convert_model(tmp_path / "nothing.gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"m\.gguf is truncated, damaged or no GGUF file"):
        gguf.convert_model(tmp_path / "m.gguf", tmp_path / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(CapacityError, match=r"cannot be converted in .*file: "):
        gguf.convert_model(tmp_path / "m.gguf", tmp_path / "file")
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package gguf: pip install 'twostroke\[gguf\]'"):
        gguf.convert_model(tmp_path / "m.gguf")


def test_a_gguf_file_is_no_name_at_the_hub() -> None:
    assert is_hub_name("org/model") and not is_hub_name("org/model.gguf")
