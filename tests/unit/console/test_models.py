"""`twostroke models`: what is on this machine, and which of it can be served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from services.common.config import EMBEDDED_MODEL
from services.console import models
from services.console.models import describe
from tests.support.models import make_model_dir


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_model_dir(tmp_path_factory.mktemp("whole"), "qwen3", max_shard_size="50KB")
    shutil.copy(EMBEDDED_MODEL / "tokenizer.json", path)
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "copy")


def change(path: Path, **fields: object) -> None:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | fields))


def test_a_whole_model_serves(whole: Path) -> None:
    row = describe("a name", whole)
    assert (row.name, row.architecture, row.quantization, row.serves) == ("a name", "Qwen3ForCausalLM", "none", "yes")
    assert describe("x", EMBEDDED_MODEL).size == f"{(EMBEDDED_MODEL / 'model.safetensors').stat().st_size / 1e9:.2f}"


def test_a_model_that_cannot_serve_says_why(copy: Path) -> None:
    shard = min(copy.glob("*.safetensors"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    assert describe("x", copy).serves.startswith(f"no: {shard.name} is missing, truncated or damaged")
    shard.unlink()
    assert describe("x", copy).serves.startswith(f"no: {shard.name} is missing, truncated or damaged")
    shard.write_bytes(data)
    change(copy, quantization_config={"quant_method": "hqq"})
    row = describe("x", copy)
    assert row.quantization == "hqq" and row.serves.startswith("no: ") and "hqq" in row.serves
    change(copy, model_type="electra", architectures=["ElectraModel"])
    row = describe("x", copy)
    assert row.architecture == "ElectraModel" and row.serves.startswith("no: has model_type 'electra', supported: ")
    (copy / "config.json").write_text("{")
    assert describe("x", copy).serves.startswith("no: config.json cannot be read as JSON")


def test_a_model_without_a_tokenizer_does_not_serve(tmp_path: Path) -> None:
    path = shutil.copytree(EMBEDDED_MODEL, tmp_path / "model")
    (path / "tokenizer.json").unlink()
    assert describe("x", path).serves.startswith("no: has no tokenizer (none of tokenizer.json")


def test_weights_in_another_format_do_not_serve(copy: Path) -> None:
    for file in copy.glob("*.safetensors*"):
        file.unlink()
    (copy / "pytorch_model.bin").touch()
    assert describe("x", copy).serves == "no: it has no safetensors (a .gguf file is served by its own path)"


def test_directories_of_models_are_listed_in_columns(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no model").mkdir()
    cache = ["--download-dir", str(tmp_path / "no cache")]
    assert models.main([str(tmp_path), str(copy), *cache]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == list(models.HEADINGS)
    assert [line.split()[0] for line in lines] == [str(copy), str(copy)]
    assert {line.index("Qwen3ForCausalLM") for line in lines} == {heading.index("ARCHITECTURE")}


@pytest.mark.parametrize(
    ("words", "named"),
    [(["/no such"], "/no such is not a directory"), (["rm", "org/none"], "'org/none' is not in the cache")],
)
def test_what_is_not_there_is_an_error(
    words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert models.main([*words, "--download-dir", str(tmp_path)]) == 1
    assert named in capsys.readouterr().err
