"""Plans of a tower: exported, found or built beside those of the text part, and run by the encoder of pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.errors import ConfigError
from services.common.vision.vision_config import load_vision_config
from services.dense_worker.encoders.vision.load import StoredTower
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.encoders.vision.tensorrt import tower_networks, tower_plans
from services.dense_worker.encoders.vision.tensorrt.tower_plans import find_or_build_tower
from services.dense_worker.encoders.vision.vision_encoder import VisionEncoder
from services.dense_worker.tensorrt import build, engine_segments, export
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.prepare import TensorRTPlans
from tests.support.dense.vision_models import make_vision_model, noise
from tests.support.workers.fake_tensorrt import make_tensorrt

CPU = torch.device("cpu")


def unexpected(*arguments: object) -> None:
    pytest.fail("plans that are there need no export")


def test_plans_are_built_once_and_run_the_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_segments, "ALIGNMENT_BYTES", 16)  # parts of tensors on a CPU
    monkeypatch.setattr(tower_plans, "current_stream", lambda: 7)
    monkeypatch.setattr(tower_plans, "synchronize", lambda: None)
    path, trt = make_vision_model(tmp_path / "model", "qwen2_5_vl"), make_tensorrt("10.0.1")
    vision = load_vision_config(path)
    assert vision is not None
    found = TensorRTPlans(TensorRT(trt), Gpu("NVIDIA H200", (9, 0), 132), EnginePlanCache(tmp_path / "plans"), {})
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"no plan for the segment tower_embed .* run `build this`"):
        find_or_build_tower(found, vision, torch.float32, "build this", lines.append)
    find_or_build_tower(found, vision, torch.float32, None, lines.append)
    assert sum("built" in line for line in lines) == 2 * len(["embed", "start", "end", "merge"])
    monkeypatch.setattr(tower_networks, "export_tower", unexpected)
    plans = find_or_build_tower(found, vision, torch.float32, "build this", lines.append)

    tower = StoredTower(vision, path, torch.float32, CPU, None).load().tower
    image = noise(50, 37, 1)
    shape = vision.layout.shape_of(image.height, image.width, is_low=False)
    tiles = np.stack([np.asarray(tile) for tile in vision.layout.tiles_of(image, shape)])
    picture = Picture("00", shape, torch.from_numpy(tiles))
    outputs = []
    for of_encoder in (None, plans):
        run = VisionEncoder(tower, vision.pixels, torch.float32, CPU, 4096, of_encoder).begin([picture])
        while (encoded := run.advance()) is None:
            pass
        outputs.append(encoded[0].rows)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-5)
    num_layers = len(tower.layers)
    runs = [segment for _, segment, *_ in trt.named("execute_async_v3")]
    assert runs == ["embed", *["start", "end"] * num_layers, "merge"]


def test_the_commands_export_and_build_a_tower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With TensorRT-RTX, which needs no GPU: from files of an export, and from the model."""
    path, out, plans = make_vision_model(tmp_path / "model", "llava_siglip"), tmp_path / "out", tmp_path / "plans"
    options = ["--output-dir", str(plans), "--profiles", "1-16", "--device", "cpu"]
    assert export.main(["--model", str(path), "--export", "batchful", "--output-dir", str(out)]) == 0
    assert build.main(["--onnx", str(out), *options]) == 0
    names = ["embed", "end", "project", "start"]
    assert sorted(each.stem for each in out.glob("tower_*.onnx")) == [f"tower_{name}" for name in names]
    built = sorted(each.name.partition("-")[0] for each in plans.glob("tower_*.plan"))
    assert built == sorted(2 * [f"tower_{name}" for name in names])
    capsys.readouterr()
    assert build.main(["--model", str(path), "--dtype", "float32", *options]) == 0
    assert "building" not in capsys.readouterr().out, "the same networks"
