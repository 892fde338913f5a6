"""Each rank needs a GPU of its own, like those of the others."""

from __future__ import annotations

import pytest

from services.common.config import load_config
from services.common.errors import ConfigError
from services.launch import gpus as gpus_module
from services.launch.gpus import Gpu, check_rank_gpus, visible_gpus

H100, T4 = Gpu("GPU-aa", "H100", 1), Gpu("GPU-bb", "T4", 1)
ALIKE = [H100, Gpu("GPU-cc", "H100", 1)]


@pytest.fixture(autouse=True)
def has_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus_module, "is_on_gpu", lambda device: device != "cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def check(monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], *settings: str) -> None:
    monkeypatch.setattr(gpus_module, "list_gpus", lambda: gpus)
    check_rank_gpus(load_config(None, list(settings)))


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_too_few(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    check(monkeypatch, ALIKE, f"dense.{kind}_parallel_size=2")
    message = rf"dense\.{kind}_parallel_size is 4, and 2 GPUs are visible: set it to 2 or less, or let CUDA_VISIBLE"
    with pytest.raises(ConfigError, match=message):
        check(monkeypatch, ALIKE, f"dense.{kind}_parallel_size=4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ConfigError, match="is 2, and 1 GPUs are visible"):
        check(monkeypatch, ALIKE, f"dense.{kind}_parallel_size=2")


def test_unequal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "the GPUs are unequal: rank 0 would have H100, rank 1 T4: let CUDA_VISIBLE_DEVICES name 2 equal ones"
    with pytest.raises(ConfigError, match=message):
        check(monkeypatch, [H100, T4, ALIKE[1]], "dense.tensor_parallel_size=2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    check(monkeypatch, [H100, T4, ALIKE[1]], "dense.tensor_parallel_size=2")


def test_nothing_is_asked_of_one_rank_or_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, [H100, T4])
    check(monkeypatch, [H100], "dense.tensor_parallel_size=2", "dense.device=cpu")
    check(monkeypatch, [], "dense.tensor_parallel_size=2")  # the workers themselves will say what they find


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["aa", "cc"]), ("1,0", ["cc", "aa"]), ("GPU-c", ["cc"]), ("0,7,1", ["aa"]), ("MIG-1", None), ("", [])],
)
def test_which_gpus_are_visible(visible: str | None, expected: list[str] | None) -> None:
    found = visible_gpus(ALIKE, visible)
    assert (None if found is None else [gpu.uuid.removeprefix("GPU-") for gpu in found]) == expected
