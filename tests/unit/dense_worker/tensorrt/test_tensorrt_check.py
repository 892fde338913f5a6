"""bench/tensorrt_check.py, as far as it runs without a GPU: sound plans pass, others fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import tensorrt_check
from bench.tensorrt_precision import TERMS_PER_SUM, Comparison, Error, error_of, summed_in_float16
from services.common.config import EMBEDDED_MODEL
from services.common.model_config import load_model_config
from services.dense_worker.model.weights import load_weights
from services.dense_worker.tensorrt import engine_segments
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.export_check import load_hugging_face
from services.dense_worker.tensorrt.gpu import Gpu, current_gpu
from services.dense_worker.tensorrt.profiles import parse_profiles
from tests.support.workers.fake_tensorrt import make_tensorrt

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def on_a_gpu() -> Iterator[None]:
    """The stand-in's memory lies on the CPU, where torch aligns it to 64 bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorrt_check, "current_gpu", lambda device: Gpu("GPU A", (9, 0), 132))
        patch.setattr(tensorrt_check, "current_stream", lambda: 7)
        patch.setattr(engine_segments, "ALIGNMENT_BYTES", 64)
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> tensorrt_check.Subject:
    config, trt = load_model_config(EMBEDDED_MODEL), make_tensorrt("8.6.0")
    weights = load_weights(EMBEDDED_MODEL, config, torch.float16, torch.device("cpu"))
    plans, profiles = tmp_path_factory.mktemp("plans"), parse_profiles("1-4,5-64")
    made, lines = tensorrt_check.make_subject(TensorRT(trt), config, torch.float16, weights, profiles, plans)
    assert sum("building" in line for line in lines) == 6
    return made


def run(check: Callable[[], dict]) -> dict:
    results: dict[str, dict] = {}
    tensorrt_check.run_check("check", check, results)
    return results["check"]


@pytest.fixture
def disturbed(subject: tensorrt_check.Subject) -> Iterator[Callable[[str, str, float], None]]:
    """Multiplies a weight that TensorRT gets by a factor; torch keeps the right one."""
    kept: list[tuple[dict[str, torch.Tensor], str, torch.Tensor]] = []

    def disturb(segment: str, name: str, factor: float) -> None:
        weights = subject.tensorrt._runs._weights[segment][0]
        kept.append((weights, name, weights[name]))
        weights[name] = weights[name].mul(factor)

    yield disturb
    for weights, name, tensor in kept:
        weights[name] = tensor


def test_sound_plans_pass(subject: tensorrt_check.Subject) -> None:
    result = run(lambda: tensorrt_check.check_agreement(subject, [1, 4, 5, 64]))
    assert result["passed"], result
    assert set(result) > {"first.qkv", "middle.qkv", "middle.residual", "last.logits"}
    assert run(lambda: tensorrt_check.check_agreement(subject, [3], 3000.0))["passed"]
    model = load_hugging_face(EMBEDDED_MODEL, subject.config, torch.float16)
    with torch.inference_mode():
        assert run(lambda: tensorrt_check.check_generation(subject, model, 4))["passed"]


@pytest.mark.parametrize(
    ("segment", "weight", "output"), [("last", "lm_head", "logits"), ("middle", "qkv_weight", "qkv")]
)
def test_a_difference_is_a_failed_check_that_names_output_and_size(
    subject: tensorrt_check.Subject, disturbed: Callable[..., None], segment: str, weight: str, output: str
) -> None:
    disturbed(segment, weight, 1.1)
    result = run(lambda: tensorrt_check.check_agreement(subject, [5]))
    assert not result["passed"] and f"beyond the limit: {segment}.{output} for 5 tokens" in result["error"]


def test_not_a_number_is_beyond_every_limit(
    subject: tensorrt_check.Subject, disturbed: Callable[..., None]
) -> None:
    disturbed("middle", "down_weight", torch.nan)
    assert "middle.qkv for 2 tokens" in run(lambda: tensorrt_check.check_agreement(subject, [2]))["error"]


def test_summing_in_float16_is_worse_than_float32_and_the_size_of_its_error_is_the_known_one() -> None:
    """Random signs: the partial sums grow like a random walk, and each is rounded to 11 bits."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(64, 4096, generator=generator).half() for _ in range(2))
    exact = x.double() @ weight.double().T
    once, summed = error_of((x.float() @ weight.float().T).half(), exact), error_of(summed_in_float16(x, weight), exact)
    unit = 2**-11 / 3**0.5  # root of the mean square of one rounding, for values just above a power of two
    assert once.rms < unit
    num_sums = 4096 / TERMS_PER_SUM
    walk = unit * (num_sums / 2) ** 0.5
    assert walk / 2 < summed.rms < walk


def test_errors_are_relative_and_limits_follow_torch() -> None:
    exact = torch.tensor([4.0, -2.0, 0.0])
    error = error_of(exact + torch.tensor([0.0, 0.4, 0.0]), exact)
    found = Comparison("x", 1, error, Error(0.06, 0.1), None, torch.float16)
    assert found.tensorrt.greatest == pytest.approx(0.1) and found.tensorrt.rms == pytest.approx((0.16 / 20) ** 0.5)
    assert found.is_good  # twice 0.06
    assert not replace(found, torch=Error(0.04, 0.1)).is_good
    assert not replace(found, torch=Error(0.06, 0.04)).is_good
    assert replace(found, torch=Error(0.04, 0.1), summed=Error(0.06, 0.1)).is_good


def test_without_a_gpu_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tensorrt_check, "current_gpu", current_gpu)
    monkeypatch.setattr("sys.argv", ["tensorrt_check.py", "--json", str(tmp_path / "results.json")])
    with pytest.raises(SystemExit, match="sees no CUDA device, nothing was checked"):
        tensorrt_check.main()
    assert not (tmp_path / "results.json").exists()
