"""Speech: how many times faster than it was spoken a Whisper is transcribed, with random weights in a true shape.

`python bench/speech.py --gpu` runs the shape of Whisper-large-v3 on a CUDA device, and `python bench/speech.py` a tiny
one on a CPU. Each client has windows of 30 s of its own, as features over gRPC, so that decoding files is not in it.
Random weights end nowhere: every output has `--tokens` tokens, by the rules of timestamps. Fluent speech has about 100
in 30 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from services.pb import gateway_pb2, sampling_pb2, source_pb2
from tests.support.cluster import Cluster, running_cluster

WINDOW_S = 30
LARGE_V3 = {
    "d_model": 1280,
    "encoder_layers": 32,
    "decoder_layers": 32,
    "encoder_attention_heads": 20,
    "decoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "vocab_size": 51_866,
    "num_mel_bins": 128,
}
TINY = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 51_866,
    "num_mel_bins": 128,
}
END, START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS = 50_257, 50_258, 50_259, 50_360, 50_364


def write_model(path: Path, shape: dict[str, Any], dtype: str) -> Path:
    """The files of a model without weights and tokenizer."""
    config = {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "eos_token_id": END,
        "bos_token_id": END,
        "pad_token_id": END,
        "decoder_start_token_id": START,
        "dtype": dtype,
        **shape,
    }
    generation = {
        "decoder_start_token_id": START,
        "eos_token_id": END,
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "lang_to_id": {"<|en|>": ENGLISH},
        "task_to_id": {"transcribe": TRANSCRIBE},
    }
    features = {"feature_size": shape["num_mel_bins"], "sampling_rate": 16_000, "chunk_length": WINDOW_S}
    for name, content in (
        ("config", config),
        ("generation_config", generation),
        ("preprocessor_config", features | {"feature_extractor_type": "WhisperFeatureExtractor"}),
    ):
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def request_of(features: bytes, num_tokens: int) -> gateway_pb2.GenerateRequest:
    """One window."""
    rules = sampling_pb2.TimestampRules(first_token_id=NO_TIMESTAMPS + 1, end_token_id=END)
    return gateway_pb2.GenerateRequest(
        max_tokens=num_tokens,
        ignore_eos=True,
        skip_special_tokens=False,
        sound=source_pb2.Source(log_mel=features),
        decoder_prompt_token_ids=gateway_pb2.TokenIds(ids=[START, ENGLISH, TRANSCRIBE]),
        sampling=sampling_pb2.SamplingParams(temperature=0.0, timestamps=rules),
    )


def run(cluster: Cluster, features: list[bytes], num_clients: int, num_tokens: int) -> tuple[float, list[float]]:
    """Seconds for all windows, and the seconds to the first token of each."""

    def transcribe(each: bytes) -> float:
        start, first = time.perf_counter(), 0.0
        num_found = 0
        for chunk in cluster.gateway.GenerateStream(request_of(each, num_tokens), timeout=300):
            first = first or time.perf_counter() - start
            num_found += len(chunk.token_ids)
        assert num_found == num_tokens, f"{num_found} tokens"
        return first

    start = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as threads:
        firsts = list(threads.map(transcribe, features))
    return time.perf_counter() - start, firsts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="the shape of Whisper-large-v3 on a CUDA device")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=2, help="windows of each client")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--set", action="append", default=[], help="further settings of the server")
    arguments = parser.parse_args()
    shape, dtype = (LARGE_V3, "bfloat16") if arguments.gpu else (TINY, "float32")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        path.mkdir()
        settings = [
            f"model.path={write_model(path, shape, dtype)}",
            "model.load_format=dummy",
            "gateway.max_message_bytes=4000000",
            "gateway.max_held_bytes=8000000000",
            "scheduler.max_num_seqs=64",
            *(["dense.backend=torch"] if arguments.gpu else []),
            "scheduler.max_num_batched_tokens=8192" if arguments.gpu else "scheduler.max_num_batched_tokens=2048",
            *arguments.set,
        ]
        generator = np.random.default_rng(0)
        with running_cluster(Path(directory), *settings) as cluster:
            for num_clients in arguments.clients:
                for name, num_rounds in (("warm-up", 1), ("measured", arguments.rounds)):
                    num_windows = num_clients * num_rounds
                    windows = generator.standard_normal((num_windows, shape["num_mel_bins"], 2 * 1500), np.float32)
                    features = [each.tobytes() for each in windows]
                    seconds, firsts = run(cluster, features, num_clients, arguments.tokens)
                    print(
                        f"{name}: {num_clients} at once, {num_windows} windows of {WINDOW_S} s in {seconds:.2f} s: "
                        f"{WINDOW_S * num_windows / seconds:.0f} times real time, first token after "
                        f"{1e3 * sorted(firsts)[len(firsts) // 2]:.0f} ms (median), {1e3 * max(firsts):.0f} (last)",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
