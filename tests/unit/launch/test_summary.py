"""The table at the end of a start."""

from __future__ import annotations

import pytest

from services.common.config import EMBEDDED_MODEL, load_config
from services.launch.summary import summarize, what_is_on
from services.pb import attn_pb2, dense_pb2

INFO = dense_pb2.DenseInfo(
    family="llama", num_layers=4, device="cuda:0", dtype="bfloat16", backend="TensorRT", max_model_len=4096
)
STATUS = attn_pb2.AttentionStatus(num_blocks=1000, block_size=16)


def test_it_says_what_runs_where_and_how_much_fits() -> None:
    config = load_config(None, ["gateway.metrics_address=127.0.0.1:9100", "gateway.http_address=0.0.0.0:8000"])
    rows = dict(summarize(config, INFO, STATUS))
    assert rows["model"] == "tiny-llama (llama, 4 layers)" and rows["device"] == "cuda:0, bfloat16, TensorRT"
    assert rows["KV cache"] == "16,000 tokens, up to 4,096 for a sequence"
    assert rows["HTTP"] == "0.0.0.0:8000" and rows["metrics"] == "http://127.0.0.1:9100/metrics of gateway"
    assert rows["weights"] == f"{(EMBEDDED_MODEL / 'model.safetensors').stat().st_size / 1e9:.2f} GB"


def test_random_weights_are_called_so() -> None:
    assert dict(summarize(load_config(None, ["model.load_format=dummy"]), INFO, STATUS))["weights"] == "random"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["attention.enable_prefix_cache=false"], []),
        (["scheduler.speculation=ngram"], ["prefix cache", "speculation by ngram"]),
        (["dense.max_loras=2", "attention.host_kv_bytes=3_000_000_000"],
         ["prefix cache", "host tier of 3.00 GB", "2 LoRA adapters at a time"]),
    ],
)  # fmt: skip
def test_it_names_what_is_on(settings: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWOSTROKE_API_KEYS", raising=False)
    assert what_is_on(load_config(None, settings)) == expected
