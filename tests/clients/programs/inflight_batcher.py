"""A client of the model `tensorrt_llm` with the options of TensorRT-LLM's inflight_batcher_llm_client.

Reads token ids from a file, sends one request over gRPC, perhaps stops it, and prints the tokens as one line of JSON.
Fails if --check-output finds other tokens. Says whether the request got all tokens that it asked for.
"""

from __future__ import annotations

import argparse
import functools
import json
import queue
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("-u", "--url", default="localhost:8001")
    parser.add_argument("--input-tokens-csv", type=Path, required=True)
    parser.add_argument("--output-tokens-csv", type=Path)
    parser.add_argument("--request-output-len", type=int, default=16)
    parser.add_argument("-S", "--streaming", action="store_true")
    parser.add_argument("-c", "--check-output", action="store_true")
    parser.add_argument("--stop-after-ms", type=int, default=0)
    parser.add_argument("--stop-via-request-cancel", action="store_true")
    parser.add_argument("--request-id", default="")
    parser.add_argument("-b", "--beam-width", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--top-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float)
    parser.add_argument("--presence-penalty", type=float)
    parser.add_argument("--frequency-penalty", type=float)
    parser.add_argument("--end-id", type=int, default=2)
    parser.add_argument("--pad-id", type=int, default=2)
    parser.add_argument("--return-log-probs", action="store_true")
    parser.add_argument("--exclude-input-in-output", action="store_true")
    parser.add_argument("--requested-outputs", nargs="+", default=[])
    parser.add_argument("--prompt-embedding-table-path", type=Path, help="a file of numpy: [tasks, rows, hidden]")
    parser.add_argument("--prompt-task-id", type=int, default=0)
    return parser.parse_args()


def read_tokens(file: Path) -> list[int]:
    return [int(each) for each in file.read_text().split(",")]


def tensor(name: str, value: Any, kind: Any) -> grpcclient.InferInput:
    """A scalar for the one row of the batch, or a list for it."""
    array = np.array([value if isinstance(value, list) else [value]], dtype=kind)
    found = grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    found.set_data_from_numpy(array)
    return found


def inputs_of(flags: argparse.Namespace, token_ids: list[int]) -> list[grpcclient.InferInput]:
    found = [
        tensor("input_ids", token_ids, np.int32),
        tensor("input_lengths", len(token_ids), np.int32),
        tensor("request_output_len", flags.request_output_len, np.int32),
        tensor("beam_width", flags.beam_width, np.int32),
        tensor("temperature", flags.temperature, np.float32),
        tensor("streaming", flags.streaming, bool),
        tensor("end_id", flags.end_id, np.int32),
        tensor("pad_id", flags.pad_id, np.int32),
        tensor("return_log_probs", flags.return_log_probs, bool),
        tensor("runtime_top_k", flags.top_k, np.int32),
        tensor("runtime_top_p", flags.top_p, np.float32),
    ]
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(flags, name) is not None:
            found.append(tensor(name, getattr(flags, name), np.float32))
    if flags.exclude_input_in_output:
        found.append(tensor("exclude_input_in_output", True, bool))
    if flags.prompt_embedding_table_path is not None:
        tables = np.load(flags.prompt_embedding_table_path)
        found.append(tensor("prompt_embedding_table", tables[flags.prompt_task_id].tolist(), tables.dtype))
        found.append(tensor("prompt_vocab_size", tables.shape[1], np.int32))
    return found


def stop_inputs() -> list[grpcclient.InferInput]:
    return [
        tensor("input_ids", 0, np.int32),
        tensor("input_lengths", 0, np.int32),
        tensor("request_output_len", 0, np.int32),
        tensor("stop", True, bool),
    ]


def note(responses: queue.Queue[Any], result: Any, error: Any) -> None:
    responses.put(error or result)


def stream(client: grpcclient.InferenceServerClient, flags: argparse.Namespace, send: dict[str, Any]) -> list[Any]:
    """All responses on a stream."""
    responses: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=functools.partial(note, responses))
    client.async_stream_infer("tensorrt_llm", **send)
    if flags.stop_after_ms:
        time.sleep(flags.stop_after_ms / 1000)
        if not flags.stop_via_request_cancel:
            client.async_stream_infer("tensorrt_llm", stop_inputs(), request_id=flags.request_id)
    client.stop_stream(cancel_requests=bool(flags.stop_after_ms and flags.stop_via_request_cancel))
    return [responses.get() for _ in range(responses.qsize())]


def call(client: grpcclient.InferenceServerClient, flags: argparse.Namespace, send: dict[str, Any]) -> list[Any]:
    """The responses to single calls."""
    responses: queue.Queue[Any] = queue.Queue()
    parameters = {"Streaming": False}
    running = client.async_infer(
        "tensorrt_llm", **send, callback=functools.partial(note, responses), parameters=parameters
    )
    count = 1
    if flags.stop_after_ms:
        time.sleep(flags.stop_after_ms / 1000)
        if flags.stop_via_request_cancel:
            running.cancel()
        else:
            count = 2
            client.async_infer(
                "tensorrt_llm",
                stop_inputs(),
                request_id=flags.request_id,
                callback=functools.partial(note, responses),
                parameters=parameters,
            )
    return [responses.get(timeout=60) for _ in range(count)]


def main() -> None:
    flags = arguments()
    prompt = read_tokens(flags.input_tokens_csv)
    send: dict[str, Any] = {"inputs": inputs_of(flags, prompt), "request_id": flags.request_id}
    if flags.requested_outputs:
        send["outputs"] = [grpcclient.InferRequestedOutput(name) for name in flags.requested_outputs]
    with grpcclient.InferenceServerClient(flags.url) as client:
        responses = stream(client, flags, send) if flags.streaming else call(client, flags, send)
    token_ids = prompt if flags.streaming and not flags.exclude_input_in_output else []
    was_cancelled, lengths, log_probs = False, None, []
    for response in responses:
        if isinstance(response, InferenceServerException):
            if response.status() != "StatusCode.CANCELLED":
                sys.exit(f"error: {response}")
            was_cancelled = True
            continue
        output_ids = response.as_numpy("output_ids")
        if output_ids is None:
            continue  # the answer to a stop
        if flags.requested_outputs and {each.name for each in response.get_response().outputs} != set(
            flags.requested_outputs
        ):
            sys.exit("other outputs than requested")
        lengths = response.as_numpy("sequence_length")
        token_ids = token_ids + output_ids[0][0].tolist()
        if flags.return_log_probs:
            log_probs += response.as_numpy("output_log_probs")[0][0].tolist()
    num_prompt_tokens = 0 if flags.exclude_input_in_output else len(prompt)
    if flags.check_output and token_ids != read_tokens(flags.output_tokens_csv):
        sys.exit(f"FAIL: {token_ids}")
    found = {"token_ids": token_ids, "cancelled": was_cancelled, "responses": len(responses), "log_probs": log_probs}
    found["is_whole"] = len(token_ids) - num_prompt_tokens >= flags.request_output_len
    print(json.dumps(found | {"length": None if lengths is None else int(lengths[0][0])}))


main()
