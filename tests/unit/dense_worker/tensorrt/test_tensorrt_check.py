"""bench/tensorrt_check.py, as far as it runs without a GPU: sound plans pass, others fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import tensorrt_check
from services.common.config import EMBEDDED_MODEL
from services.common.model_config import load_model_config
from services.dense_worker.model.weights import load_weights
from services.dense_worker.tensorrt import engine_segments
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.export_check import load_hugging_face
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.profiles import parse_profiles
from tests.support.workers.fake_tensorrt import make_tensorrt

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> tensorrt_check.Subject:
    config, trt = load_model_config(EMBEDDED_MODEL), make_tensorrt("8.6.0")
    weights = load_weights(EMBEDDED_MODEL, config, torch.float16, torch.device("cpu"))
    plans = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorrt_check, "current_gpu", lambda device: Gpu("GPU A", (9, 0), 132))
        patch.setattr(tensorrt_check, "current_stream", lambda: 7)
        profiles = parse_profiles("1-4,5-64")
        made, lines = tensorrt_check.make_subject(
            TensorRT(trt), config, torch.float16, weights, profiles, plans
        )
    assert sum("building" in line for line in lines) == 3
    return made


@pytest.fixture(autouse=True)
def cpu_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_segments, "ALIGNMENT_BYTES", 64)


def test_sound_plans_pass(subject: tensorrt_check.Subject) -> None:
    results: dict[str, dict] = {}
    tensorrt_check.run_check("sizes", lambda: tensorrt_check.check_agreement(subject, [1, 4, 5, 64]), results)
    tensorrt_check.run_check("norms", lambda: tensorrt_check.check_agreement(subject, [3], 3000.0), results)
    model = load_hugging_face(EMBEDDED_MODEL, subject.config, torch.float16)
    with torch.inference_mode():
        tensorrt_check.run_check("text", lambda: tensorrt_check.check_generation(subject, model, 4), results)
    assert [result["passed"] for result in results.values()] == [True, True, True], results


def test_a_difference_is_a_failed_check_with_its_size(subject: tensorrt_check.Subject) -> None:
    results: dict[str, dict] = {}
    lm_head = subject.weights.head.lm_head.weight.matrix.data
    kept = lm_head.clone()
    try:
        subject.tensorrt._weights["last"][0]["lm_head"] = kept.mul(1.1)
        tensorrt_check.run_check("sizes", lambda: tensorrt_check.check_agreement(subject, [5]), results)
    finally:
        subject.tensorrt._weights["last"][0]["lm_head"] = lm_head
    assert not results["sizes"]["passed"] and "last.logits for 5 tokens differs" in results["sizes"]["error"]


def test_without_a_gpu_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["tensorrt_check.py", "--json", str(tmp_path / "results.json")])
    with pytest.raises(SystemExit, match="sees no CUDA device, nothing was checked"):
        tensorrt_check.main()
    assert not (tmp_path / "results.json").exists()
