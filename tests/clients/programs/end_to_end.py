"""A client with the options of TensorRT-LLM's end_to_end_test: all steps one by one, the ensemble, then many at once.

The dataset is a JSON list of objects with the texts `input`, `instruction` and `output`. Prints the texts.
"""

from __future__ import annotations

import argparse
import functools
import json
import queue
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import np_to_triton_dtype


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("-u", "--url", required=True)
    parser.add_argument("-i", "--protocol", choices=["http", "grpc"], default="http")
    parser.add_argument("-c", "--concurrency", type=int, default=128)
    parser.add_argument("--max-input-len", type=int, required=True)
    parser.add_argument("--dataset", type=Path, required=True)
    return parser.parse_args()


FLAGS = arguments()
LIBRARY: Any = httpclient if FLAGS.protocol == "http" else grpcclient


def tensor(name: str, array: np.ndarray) -> Any:
    found = LIBRARY.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    found.set_data_from_numpy(array)
    return found


def inputs_of(prompt: str, num_tokens: int, names: tuple[str, str, str, str]) -> list[Any]:
    text, count, bad_words, stop_words = names
    nothing = np.array([[""]], dtype=object)
    return [
        tensor(text, np.array([[prompt]]).astype(object)),
        tensor(bad_words, nothing),
        tensor(stop_words, nothing),
        tensor(count, np.array([[num_tokens]], dtype=np.uint32)),
    ]


def ensemble_inputs(prompt: str, num_tokens: int) -> list[Any]:
    return inputs_of(prompt, num_tokens, ("text_input", "max_tokens", "bad_words", "stop_words"))


def step_by_step(client: Any, prompt: str, num_tokens: int, request_id: str) -> Any:
    names = ("QUERY", "REQUEST_OUTPUT_LEN", "BAD_WORDS_DICT", "STOP_WORDS_DICT")
    first = client.infer("preprocessing", inputs_of(prompt, num_tokens, names), request_id=request_id)
    inputs = [
        tensor("input_ids", first.as_numpy("INPUT_ID")),
        tensor("input_lengths", first.as_numpy("REQUEST_INPUT_LEN")),
        tensor("request_output_len", first.as_numpy("REQUEST_OUTPUT_LEN")),
    ]
    second = client.infer("tensorrt_llm", inputs, request_id=request_id)
    inputs = [
        tensor("TOKENS_BATCH", second.as_numpy("output_ids")),
        tensor("SEQUENCE_LENGTH", second.as_numpy("sequence_length")),
    ]
    return client.infer("postprocessing", inputs, request_id=request_id).as_numpy("OUTPUT")


def all_at_once(client: Any, requests: list[tuple[str, int]]) -> list[Any]:
    """The texts of all requests, sent without waiting."""
    if FLAGS.protocol == "http":
        running = [
            client.async_infer("ensemble", ensemble_inputs(*each), request_id=str(i))
            for i, each in enumerate(requests)
        ]
        return [each.get_result().as_numpy("text_output") for each in running]
    answers: queue.Queue[Any] = queue.Queue()

    def note(index: int, result: Any, error: Any) -> None:
        answers.put((index, result, error))

    for i, each in enumerate(requests):
        client.async_infer(
            "ensemble", ensemble_inputs(*each), callback=functools.partial(note, i), request_id=str(i)
        )
    texts: list[Any] = [None] * len(requests)
    for _ in requests:
        index, result, error = answers.get(timeout=100)
        assert error is None, error
        texts[index] = result.as_numpy("text_output")
    return texts


def main() -> None:
    options = {"concurrency": FLAGS.concurrency} if FLAGS.protocol == "http" else {}
    client = LIBRARY.InferenceServerClient(FLAGS.url, **options)
    requests = []
    for each in json.loads(FLAGS.dataset.read_text()):
        prompt = f"{each['input']} {each['instruction']}"
        if len(prompt.split(" ")) / 1.3 <= FLAGS.max_input_len:
            requests.append((prompt, int(len(each["output"].split(" ")) * 1.3)))
    texts = []
    for i, each in enumerate(requests):
        whole = client.infer("ensemble", ensemble_inputs(*each), request_id=str(i)).as_numpy("text_output")
        if step_by_step(client, *each, request_id=str(i)) != whole:
            sys.exit(f"the steps do not give the ensemble's text for {each[0]!r}")
        texts.append(whole)
    if all_at_once(client, requests) != texts:
        sys.exit("many requests at once got other texts")
    print(json.dumps([text.decode() for each in texts for text in each]))


main()
