"""Models in GGUF files become those that Hugging Face has, or are refused by the name of what is not read."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
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


def test_files_beside_a_model_leave_its_tokenizer_as_it_is(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", EMBEDDED_MODEL, "Q8_0")
    other = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())
    vocab = other["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    (tmp_path / "tokenizer_config.json").write_text((EMBEDDED_MODEL / "tokenizer_config.json").read_text())
    convert(tmp_path / "m.gguf", tmp_path / "made")
    made, original = (AutoTokenizer.from_pretrained(each) for each in (tmp_path / "made", EMBEDDED_MODEL))
    assert made.encode("a b ab") == original.encode("a b ab")


def test_tokens_that_the_tokenizer_lacks_are_named(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, EMBEDDED_MODEL, "Q8_0")
    content = file.read_bytes()
    file.write_bytes(content.replace(text("\u0101".encode()), text("\u0100".encode()), 1))
    with pytest.raises(ModelError, match=r"has '\u0100' as its token \d+, of which transformers makes None$"):
        convert(file, tmp_path / "made")
    file.write_bytes(content.replace(b"ggml.bos_token_id", b"ggml.xxx_token_id", 1))
    with pytest.raises(ModelError, match="asks for a token at the beginning of each text, and names none"):
        convert(file, tmp_path / "again")


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (text(b"general.x") + struct.pack("<IIQ", 9, 0, 2**40), "general.x takes 1099511627776 bytes where"),
        (text(b"general.x") + struct.pack("<IIQ", 9, 10, 2**61), "general.x takes 18446744073709551616 bytes where"),
        (text(b"general.x") + struct.pack("<IIQQ", 9, 8, 2**40, 2**50), "general.x takes 1125899906842624 bytes where"),
        (text(b"general.x") + struct.pack("<IQ", 8, 2**40), "general.x takes 1099511627776 bytes where"),
        (text(b"general.x") + struct.pack("<IIQ", 9, 9, 2**40), "general.x has values of the type 9"),
        (struct.pack("<Q", 2**63), "a key takes 9223372036854775808 bytes where"),
        (text(b"general.x") + struct.pack("<IQ", 8, 2) + b"\xff\xff", "'utf-8' codec can't decode"),
        (text(b"\xff") + struct.pack("<II", 4, 1), "'utf-8' codec can't decode"),
        (text(b"general.x") + struct.pack("<IIQQ", 9, 8, 1, 1) + b"\xff", "'utf-8' codec can't decode"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
def test_a_length_beyond_the_file_is_refused_before_the_package_reads_it(
    entry: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_gguf.gguf, "GGUFReader", None)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + bytes(64))
    with pytest.raises(ModelError, match=f"{file} is truncated, damaged or no GGUF file: {said}"):
        convert(file, tmp_path / "made")


def test_the_package_reads_with_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_gguf, "HEADER_BYTES", -(2**20))
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(ModelError, match=f"{file} is truncated, damaged or no GGUF file: .*Cannot allocate memory"):
        convert(file, tmp_path / "made")
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"heads": 0}, r"has llama\.attention\.head_count = 0, which is not a positive integer"),
        ({"heads": [4]}, r"has llama\.attention\.head_count = \[4\], which is not a positive integer"),
        ({"heads": 64}, "has heads of 1 numbers, rotated are pairs of them"),
        ({"eps": float("nan")}, r"has llama\.attention\.layer_norm_rms_epsilon = nan, which is not a positive number"),
        ({"token_embd": (64,)}, r"lacks the tensor token_embd\.weight, a matrix"),
        ({"attn_q": (7, 64)}, r"has blk\.0\.attn_q\.weight in the shape \(7, 64\), its keys ask for \(64, 64\)"),
        ({"attn_norm": (64, 1)}, r"attn_norm\.weight in the shape \(64, 1\), its keys ask for \(64,\)"),
        ({"layers": 2**31}, r"has 2147483648 layers by its keys, and lacks blk\.1\.attn_norm\.weight"),
        ({"bos": [1]}, r"has tokenizer\.ggml\.bos_token_id = \[1\], which is not an integer"),
        ({}, r"lacks tokenizer\.ggml\.tokens, an array"),
        ({"architecture": ["llama"]}, r"has the architecture \['llama'\], GGUF is read of"),
    ],
)
def test_values_that_are_none_of_a_model_are_named(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    writer = GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    if "architecture" in values:
        del writer.kv_data[0]["general.architecture"]
        writer.add_array("general.architecture", values["architecture"])
    for add in (writer.add_context_length, writer.add_embedding_length, writer.add_feed_forward_length):
        add(64)
    writer.add_block_count(values.get("layers", 1))
    if "bos" in values:
        writer.add_array("tokenizer.ggml.bos_token_id", values["bos"])
    heads = values.get("heads", 4)
    if isinstance(heads, int):
        writer.add_head_count(heads)
    else:
        writer.add_array("llama.attention.head_count", heads)
    writer.add_layer_norm_rms_eps(values.get("eps", 1e-5))
    shapes = {"token_embd": (32, 64), "attn_q": (64, 64), "attn_norm": (64,)}
    for name, shape in shapes.items():
        place = name if name == "token_embd" else f"blk.0.{name}"
        writer.add_tensor(f"{place}.weight", np.zeros(values.get(name, shape), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=said):
        convert(tmp_path / "m.gguf", tmp_path / "made")


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
