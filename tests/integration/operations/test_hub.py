"""Models by name, from a Hub on the loopback interface: served, resumed, and refused with one sentence."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.config import EMBEDDED_MODEL
from tests.support.cluster import free_port
from tests.support.hub import COMMIT, TOKEN, Hub, Repository
from tests.support.warm_process import run_warm

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
MODEL_FILES = {name: (EMBEDDED_MODEL / name).read_bytes() for name in FILES}
WEIGHTS = "model.safetensors"
CHUNK_BYTES = 10 * 2**20  # that huggingface_hub writes at once; what it has of the next one is lost when all breaks


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub({"org/tiny": Repository(dict(MODEL_FILES))}).serving() as hub:
        yield hub


def run(hub: Hub, directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = kept | {"HF_HOME": str(directory / "hf"), "HF_ENDPOINT": hub.address} | environment
    return run_warm("tests.support.workers.hub_user", *arguments, env=environment)


def fetch(hub: Hub, directory: Path, *arguments: str, **environment: str) -> Path:
    """Downloads and returns the directory."""
    done = run(hub, directory, "path", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    path, name = done.stdout.splitlines()
    assert name == arguments[0]
    return Path(path)


def refused(hub: Hub, directory: Path, *arguments: str, **environment: str) -> str:
    """The last line of standard error of a download that fails."""
    done = run(hub, directory, "path", *arguments, **environment)
    assert done.returncode == 1 and not done.stdout, done.stderr
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("services.launch: model ")
    return line


def test_a_model_is_served_by_its_name(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["org/tiny"].files |= {
        "original/other.safetensors": b"not wanted",
        "pytorch_model.bin": b"nor this",
    }
    command = ["services.console", "serve", "org/tiny", "--prompt", "San Francisco is a", "--max-tokens", "7"]
    done = run(hub, tmp_path, *command)
    assert (done.stdout, done.returncode) == (" city in Northern California that is known\n", 0), done.stderr
    assert len(hub.downloads(WEIGHTS)) == 1
    assert not hub.downloads("other.safetensors") and not hub.downloads("pytorch_model.bin")


def test_folders_that_belong_to_a_model_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    wanted = {
        "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "3_Normalize/config.json",
        "10_Dense/config.json", "additional_chat_templates/tool_use.jinja", "modules.json",
    }  # fmt: skip
    others = {
        "original/a.json", "onnx/b.json", "awq/c.safetensors", "8bit/d.safetensors", "adapter/e.json",
        "1_Pooling/deep/f.json", "0_Transformer/g.safetensors", "1_Old/h.json", "1_Pool/i.json", "1_Pooling2/j.json",
        "1_/k.json", "1/l.json", "100_Dense/m.json", "additional/n.json", "add_ons/o.json", "a/p.json",
        "consolidated.safetensors", "consolidated-00001-of-00002.safetensors",
    }  # fmt: skip
    hub.repositories["org/tiny"].files |= dict.fromkeys(wanted | others, b"{}")
    path = fetch(hub, tmp_path, "org/tiny")
    assert {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} == {*FILES, *wanted}


def test_it_is_kept_and_found_without_a_network(hub: Hub, tmp_path: Path) -> None:
    path = fetch(hub, tmp_path, "org/tiny", "--revision", "main")
    assert path.name == COMMIT and {each.name for each in path.iterdir()} == set(FILES)
    assert (path / WEIGHTS).read_bytes() == MODEL_FILES[WEIGHTS]
    assert fetch(hub, tmp_path, "org/tiny") == path
    num_requests = len(hub.requests)
    assert fetch(hub, tmp_path, "org/tiny", HF_HUB_OFFLINE="1") == path
    assert len(hub.requests) == num_requests and len(hub.downloads(WEIGHTS)) == 1
    assert fetch(hub, tmp_path, "org/tiny", HF_ENDPOINT=f"http://127.0.0.1:{free_port()}") == path


def test_the_directory_for_downloads_can_be_chosen(hub: Hub, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path, "org/tiny", "--download-dir", str(tmp_path / "own")).is_relative_to(tmp_path / "own")


def test_a_broken_download_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    data = os.urandom(5 * CHUNK_BYTES)
    hub.repositories["org/tiny"].files[WEIGHTS] = data
    hub.repositories["org/tiny"].breaks[WEIGHTS] = 2
    assert (fetch(hub, tmp_path, "org/tiny") / WEIGHTS).read_bytes() == data
    # Half of the file is two whole chunks and a half, and half of the rest another one and a half.
    assert hub.downloads(WEIGHTS) == [None, f"bytes={2 * CHUNK_BYTES}-", f"bytes={3 * CHUNK_BYTES}-"]


def test_a_file_of_another_size_than_announced_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["org/tiny"].wrong_sizes[WEIGHTS] = len(MODEL_FILES[WEIGHTS]) + 1
    line = refused(hub, tmp_path, "org/tiny")
    assert f"should be of size {len(MODEL_FILES[WEIGHTS]) + 1} but has size {len(MODEL_FILES[WEIGHTS])}" in line
    assert not list((tmp_path / "hf").rglob(WEIGHTS))


def test_a_gated_model_needs_a_token(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["org/tiny"].is_gated = True
    line = refused(hub, tmp_path, "org/tiny")
    assert f"is gated: accept its terms at {hub.address}/org/tiny, then set HF_TOKEN" in line
    assert "is gated" in refused(hub, tmp_path, "org/tiny", HF_TOKEN="hf_of_somebody_else")
    assert fetch(hub, tmp_path, "org/tiny", HF_TOKEN=TOKEN).name == COMMIT


def test_a_model_without_safetensors_is_refused_before_anything_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    files = hub.repositories["org/tiny"].files
    files["pytorch_model.bin"] = files.pop(WEIGHTS)
    line = refused(hub, tmp_path, "org/tiny")
    assert "has no safetensors, the only format that is read; its weights are in .bin" in line
    assert not hub.downloads("pytorch_model.bin") and not hub.downloads("config.json")


def test_an_unknown_model_and_an_unknown_revision_are_named(hub: Hub, tmp_path: Path) -> None:
    line = refused(hub, tmp_path, "org/tny")
    assert f"'org/tny' is neither a directory here nor a public model at {hub.address}" in line
    line = refused(hub, tmp_path, "org/tiny", "--revision", "v2")
    assert "'org/tiny', revision 'v2' is not at" in line


def test_without_a_network_and_a_cache_the_settings_are_named(hub: Hub, tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    line = refused(hub, tmp_path, "org/tiny", HF_ENDPOINT=address)
    assert f"is not complete in the cache, and not to be had from {address}: " in line and "refused" in line
    assert "HF_HUB_OFFLINE" in refused(hub, tmp_path, "org/tiny", HF_HUB_OFFLINE="1")
    assert not hub.requests


def test_a_cache_that_cannot_be_written_is_named(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refused(hub, tmp_path, "org/tiny", "--download-dir", str(tmp_path / "file" / "below"))
    assert "cannot be written to the cache" in line and str(tmp_path / "file") in line


def test_nothing_is_downloaded_for_a_config_that_is_wrong(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, "path", "org/tiny", "--max-num-seqs", "0")
    assert done.returncode == 1 and "scheduler.max_num_seqs = 0" in done.stderr
    done = run(hub, tmp_path, "path", "--revision", "main")
    assert done.returncode == 1 and "--revision, --download-dir and --hub belong to a model by name" in done.stderr
    assert not hub.requests


def test_models_are_pulled_listed_and_removed(hub: Hub, tmp_path: Path) -> None:
    calls = (["pull", "org/tiny"], [], ["rm", "org/tiny"], [], ["pull", "org/none"])
    done = run(hub, tmp_path, "models", json.dumps(calls))
    pulled, listed, removed, empty, unknown, _ = done.stdout.split("status ")
    directory = Path(pulled.strip())
    assert directory.is_relative_to(tmp_path / "hf") and not directory.exists()
    assert [line.split() for line in listed.splitlines()[2:]] == [
        ["org/tiny", "LlamaForCausalLM", "0.01", "none", "yes"]
    ]
    assert removed.startswith("0\norg/tiny is removed, 0.01 GB are free")
    assert empty.startswith("0\nthere are no models") and unknown.startswith("0") and done.stdout.endswith("status 1\n")
    assert "'org/none' is neither a directory here nor a public model" in done.stderr
