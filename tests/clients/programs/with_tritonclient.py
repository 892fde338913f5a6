"""Every call of tritonclient 2.73 that the gateway serves, over gRPC and HTTP. Prints what it got, as one line of JSON.

Arguments: addresses of gRPC and HTTP, a prompt, and the number of tokens to generate.
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

GRPC, HTTP, PROMPT, NUM_TOKENS = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
TEXT = np.array([[PROMPT.encode()]], dtype=object)
COUNT = np.array([[NUM_TOKENS]], dtype=np.int32)
MODELS = ["ensemble", "preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls"]


def tensors(protocol: Any, values: dict[str, np.ndarray]) -> list[Any]:
    found = []
    for name, array in values.items():
        found.append(protocol.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        found[-1].set_data_from_numpy(array)
    return found


def text_of(result: Any, name: str = "text_output") -> str:
    [text] = result.as_numpy(name).ravel()
    return text.decode()


def about(client: Any) -> dict[str, Any]:
    """What the client is told about the server and its models."""
    is_http = isinstance(client, httpclient.InferenceServerClient)
    index = client.get_model_repository_index()
    config = client.get_model_config("ensemble")
    metadata = client.get_model_metadata("tensorrt_llm")
    server = client.get_server_metadata()
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "models": [name for name in [*MODELS, "embedding", "nothing"] if client.is_model_ready(name)],
        "version": client.is_model_ready("ensemble", "1") and not client.is_model_ready("ensemble", "2"),
        "server": server["name"] if is_http else server.name,
        "index": [each["name"] for each in index] if is_http else [each.name for each in index.models],
        "batch": config["max_batch_size"] if is_http else config.config.max_batch_size,
        "first_input": metadata["inputs"][0]["name"] if is_http else metadata.inputs[0].name,
        "decoupled": (
            config["model_transaction_policy"]["decoupled"]
            if is_http
            else config.config.model_transaction_policy.decoupled
        ),
    }


def steps(protocol: Any, client: Any) -> dict[str, Any]:
    """The three steps one by one, and the ensemble of them."""
    words = {name: np.array([[b""]], dtype=object) for name in ("BAD_WORDS_DICT", "STOP_WORDS_DICT")}
    first = client.infer(
        "preprocessing",
        tensors(protocol, {"QUERY": TEXT, "REQUEST_OUTPUT_LEN": COUNT.astype(np.uint32), **words}),
        request_id="1",
    )
    inputs = {
        "input_ids": first.as_numpy("INPUT_ID"),
        "input_lengths": first.as_numpy("REQUEST_INPUT_LEN"),
        "request_output_len": first.as_numpy("REQUEST_OUTPUT_LEN"),
    }
    second = client.infer("tensorrt_llm", tensors(protocol, inputs), request_id="1")
    third = client.infer(
        "postprocessing",
        tensors(
            protocol,
            {
                "TOKENS_BATCH": second.as_numpy("output_ids"),
                "SEQUENCE_LENGTH": second.as_numpy("sequence_length"),
            },
        ),
    )
    options = {"bad_words": np.array([[b""]], dtype=object), "return_log_probs": np.array([[True]])}
    whole = client.infer(
        "ensemble", tensors(protocol, {"text_input": TEXT, "max_tokens": COUNT, **options}), request_id="1"
    )
    named = client.infer(
        "tensorrt_llm_bls",
        tensors(protocol, {"text_input": TEXT, "max_tokens": COUNT}),
        outputs=[protocol.InferRequestedOutput("text_output")],
    )
    return {
        "token_ids": second.as_numpy("output_ids").ravel().tolist(),
        "texts": [text_of(third, "OUTPUT"), text_of(whole), text_of(named)],
        "log_probs": whole.as_numpy("output_log_probs").shape,
        "cum_log_probs": float(whole.as_numpy("cum_log_probs")[0, 0]),
        "sum_log_probs": float(whole.as_numpy("output_log_probs").sum()),
    }


def errors(protocol: Any, client: Any) -> list[str]:
    """What the client raises for wrong requests."""
    wrong = [
        ("nothing", {"text_input": TEXT, "max_tokens": COUNT}),
        ("ensemble", {"text_input": TEXT}),
        ("ensemble", {"text_input": TEXT, "max_tokens": -COUNT}),
        ("ensemble", {"text_input": TEXT, "max_tokens": COUNT, "beam_width": 100 * COUNT}),
    ]
    found = []
    for model, values in wrong:
        try:
            client.infer(model, tensors(protocol, values))
            found.append("no error")
        except InferenceServerException as error:
            found.append(f"{error.status()} {error.message()}")
    return found


def streamed(client: grpcclient.InferenceServerClient) -> dict[str, Any]:
    """Pieces of a stream with two requests at once."""
    responses: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: responses.put((result, error)))
    for request_id in ("a", "b"):
        inputs = {"text_input": TEXT, "max_tokens": COUNT, "stream": np.array([[True]])}
        client.async_stream_infer("ensemble", tensors(grpcclient, inputs), request_id=request_id)
    client.stop_stream()
    pieces: dict[str, list[str]] = {"a": [], "b": []}
    finals: dict[str, list[bool]] = {"a": [], "b": []}
    while not responses.empty():
        result, error = responses.get()
        assert error is None, error
        response = result.get_response()
        pieces[response.id].append(text_of(result))
        finals[response.id].append(response.parameters["triton_final_response"].bool_param)
    return {"pieces": pieces, "finals": finals}


def main() -> None:
    grpc_client = grpcclient.InferenceServerClient(GRPC)
    http_client = httpclient.InferenceServerClient(HTTP, concurrency=4)
    compressed = http_client.infer(
        "ensemble",
        tensors(httpclient, {"text_input": TEXT, "max_tokens": COUNT}),
        request_compression_algorithm="gzip",
        response_compression_algorithm="gzip",
    )
    plain = http_client.infer(
        "ensemble",
        tensors(httpclient, {"text_input": TEXT, "max_tokens": COUNT}),
        outputs=[httpclient.InferRequestedOutput("text_output", binary_data=False)],
    )
    running = [
        http_client.async_infer("ensemble", tensors(httpclient, {"text_input": TEXT, "max_tokens": COUNT}))
        for _ in range(4)
    ]
    several = [text_of(each.get_result()) for each in running]  # each holds a connection until it is read
    found = {
        "about": [about(grpc_client), about(http_client)],
        "steps": [steps(grpcclient, grpc_client), steps(httpclient, http_client)],
        "errors": [errors(grpcclient, grpc_client), errors(httpclient, http_client)],
        "streamed": streamed(grpc_client),
        "compressed": text_of(compressed),
        "several": several,
        "plain": plain.as_numpy("text_output").tolist(),
        "statistics": [
            http_client.get_inference_statistics("ensemble")["model_stats"][0]["inference_count"],
            grpc_client.get_inference_statistics("ensemble").model_stats[0].inference_count,
        ],
    }
    print(json.dumps(found))


main()
