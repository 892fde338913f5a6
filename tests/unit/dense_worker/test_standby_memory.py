"""Which standby fits into memory: `auto` takes the dearest; one that was asked for by name and does not is an error."""

from __future__ import annotations

import pytest
from safetensors import safe_open

from services.common.child_options import Standby
from services.common.config import EMBEDDED_MODEL, load_config
from services.common.errors import CapacityError
from services.common.process import STANDBY_BYTES
from services.dense_worker import standby
from services.dense_worker.build import resolve_dense_model
from services.dense_worker.standby import holds_weights, weight_bytes


def stored_values() -> int:
    """The number of values in the embedded model's files; its lm_head is tied, so that none is there twice."""
    count = 0
    for path in EMBEDDED_MODEL.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            count += sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    return count


def test_the_size_of_the_weights_is_that_of_the_checkpoint_in_the_dtype() -> None:
    model = resolve_dense_model(load_config(None, ["dense.device=cpu", "model.dtype=float32"]))
    assert weight_bytes(model) == 4 * stored_values()


@pytest.mark.parametrize(
    ("asked", "spare_bytes", "expected"),
    [
        ("auto", 0, True),
        ("auto", -1, False),
        ("imports", 0, False),
        ("loaded", 0, True),
        ("loaded", -1, "needs {need} bytes, {need} of them for its copy of the weights, {left} are free on cpu"),
        ("auto", -STANDBY_BYTES, "a standby of the dense worker needs 1073741824 bytes of host memory, {need} are"),
    ],
)
def test_what_a_standby_holds(
    asked: Standby, spare_bytes: int, expected: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = resolve_dense_model(load_config(None, ["dense.device=cpu"]))
    need = weight_bytes(model)
    monkeypatch.setattr(standby, "available_bytes", lambda: STANDBY_BYTES + need + spare_bytes)
    if isinstance(expected, bool):
        assert holds_weights(asked, model, need) == expected
    else:
        with pytest.raises(CapacityError, match=expected.format(need=need, left=need + spare_bytes)):
            holds_weights(asked, model, need)


def test_a_standby_needs_no_memory_for_weights_that_the_launcher_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve_dense_model(load_config(None, ["dense.device=cpu"]))
    monkeypatch.setattr(standby, "available_bytes", lambda: STANDBY_BYTES)
    assert holds_weights("auto", model, 0)
    assert not holds_weights("auto", model, 1)
