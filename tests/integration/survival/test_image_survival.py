"""Chats with pictures, end to end and over kills; Hugging Face gives the expected tokens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from services.pb import triton_pb2, triton_pb2_grpc
from tests.support.clients.http_clients import client
from tests.support.clients.inference_messages import int32, message, output, texts
from tests.support.clients.openai_client import openai_client
from tests.support.clients.streams import collect_all
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, children_of, running_cluster
from tests.support.dense.vision_models import VARIANTS, noise
from tests.support.served_vision import (
    Truth,
    Turn,
    beams_message,
    chat_message,
    data_url,
    expected_tokens,
    make_served_vision_model,
    pictures_of,
    rendered,
)

pytestmark = pytest.mark.timeout(300)  # processes start several times, and the machine may be slow

FIRST, SECOND, THIRD = noise(50, 37, 1), noise(20, 60, 2), noise(64, 64, 3)
LARGE = noise(160, 152, 4)  # whose pixels reach the worker in a memory file
NUM_LONG_TOKENS = 100  # so many that a kill comes in the middle
BLOCK_SIZE = 16  # of the KV cache


@dataclass
class Server:
    cluster: Cluster
    model: Path

    def expected(self, turns: Sequence[Turn], max_tokens: int) -> list[int]:
        return expected_tokens(self.model, rendered(turns), pictures_of(turns), max_tokens)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("images")
    settings = {
        "model.path": directory / "model",
        "scheduler.max_num_batched_tokens": 64,
        "dense.max_encoder_rows": 160,  # two of the pictures, or one of the third
        "attention.num_blocks": 200,
        "scheduler.max_beam_width": 3,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    with pytest.MonkeyPatch.context() as patch:
        # Both read it: what makes the model's files, and what gives the truth.
        patch.setitem(VARIANTS["qwen2_5_vl"].processor, "max_pixels", LARGE.width * LARGE.height)
        model = make_served_vision_model(directory / "model")
        with running_cluster(directory, *overrides, is_warm=True) as cluster:
            yield Server(cluster, model)
            cluster.wait_idle()


def test_the_openai_client_sends_pictures_and_prefixes_with_them_are_cached(server: Server) -> None:
    turns: list[Turn] = [("user", ["What is ", FIRST, " beside ", SECOND, "?"])]
    extra = {"ignore_eos": True, "return_token_ids": True}
    with openai_client(server.cluster) as api:
        for num_turns in (1, 2):
            messages = [
                {
                    "role": role,
                    "content": parts[0]
                    if role == "assistant"
                    else [
                        {"type": "text", "text": part}
                        if isinstance(part, str)
                        else {"type": "image_url", "image_url": {"url": data_url(part), "detail": "auto"}}
                        for part in parts
                    ],
                }
                for role, parts in turns
            ]
            answer = api.chat.completions.create(
                model="model", messages=messages, max_tokens=12, temperature=0, extra_body=extra
            )
            assert answer.choices[0].token_ids == server.expected(turns, 12)
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            num_cached = answer.usage.prompt_tokens_details.cached_tokens
            assert (num_cached > 0) == (num_turns == 2)
            turns += [("assistant", ["A cat."]), ("user", ["And ", THIRD, "?"])]


def test_messages_and_responses_have_pictures(server: Server) -> None:
    turns: list[Turn] = [("user", ["Look", SECOND, "\nNow?"])]
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    text = tokenizer.decode(server.expected(turns, 12), skip_special_tokens=True)
    source = {"type": "base64", "media_type": "image/png", "data": data_url(SECOND).partition(",")[2]}
    blocks = [{"type": "text", "text": "Look"}, {"type": "image", "source": source}, {"type": "text", "text": "Now?"}]
    asked = {"model": "model", "messages": [{"role": "user", "content": blocks}]}
    with client(server.cluster.http_address) as http:
        answer = http.post("/v1/messages", json=asked | {"max_tokens": 12, "temperature": 0}).json()
        assert answer["content"][0]["text"] and text.startswith(answer["content"][0]["text"])
        counted = http.post("/v1/messages/count_tokens", json=asked).json()
        assert counted["input_tokens"] == answer["usage"]["input_tokens"] > 16
    with openai_client(server.cluster) as api:
        parts = [
            {"type": "input_text", "text": "Look"},
            {"type": "input_image", "image_url": data_url(SECOND), "detail": "high"},
            {"type": "input_text", "text": "Now?"},
        ]
        response = api.responses.create(
            model="model", input=[{"role": "user", "content": parts}], max_output_tokens=12, temperature=0
        )
        assert response.output_text and text.startswith(response.output_text)


def test_triton_has_pictures_as_pixels_and_as_urls(server: Server) -> None:
    turns: list[Turn] = [("user", [FIRST, "and", SECOND, "?"])]
    text = rendered(turns)
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    token_ids = expected_tokens(server.model, text, pictures_of(turns), 12)
    expected = tokenizer.decode(token_ids, skip_special_tokens=True)
    pixels = np.asarray(FIRST)[None, None]
    inputs = {"text_input": texts([text]), "max_tokens": int32([12]), "image_bytes_input": pixels}
    inputs["exclude_input_in_output"] = np.array([[True]])
    with grpc.insecure_channel(server.cluster.address) as channel:
        infer = triton_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        answer = infer(message("ensemble", inputs | {"image_url_input": texts([data_url(SECOND)])}))
        assert output(answer, "text_output") == [expected]
        with pytest.raises(grpc.RpcError, match="shape"):
            infer(message("ensemble", inputs | {"image_bytes_input": pixels[..., :2]}))
    with client(server.cluster.http_address) as http:
        urls = [data_url(FIRST), data_url(SECOND)]
        body = {"text_input": text, "max_tokens": 12, "exclude_input_in_output": True, "image_url_input": urls}
        answer = http.post("/v2/models/ensemble/generate", json=body).json()
        assert answer["text_output"] == expected
        refused = http.post("/v2/models/ensemble/generate", json=body | {"image_bytes_input": [1, 2, 3]})
        assert refused.status_code == 400 and "image_url_input" in refused.json()["error"]


def test_the_three_steps_of_triton_have_pictures_over_a_kill(server: Server) -> None:
    """`preprocessing` gives the prompt of transformers' processors, and `tensorrt_llm` reads it with its pictures."""
    turns: list[list[Turn]] = [[("user", [FIRST, "and", SECOND, "?"])], [("user", [THIRD, "alone", LARGE])]]
    truth, max_tokens = Truth(server.model), 40
    prompts = [truth.prompt_ids(each) for each in turns]
    pixels = [np.asarray(each)[None, None] for each in (FIRST, THIRD)]
    urls = [texts([data_url(each)]) for each in (SECOND, LARGE)]
    ask = {"request_output_len": int32([max_tokens]), "end_id": int32([-1])}
    with grpc.insecure_channel(server.cluster.address) as channel:
        infer = triton_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        given = []
        for each, first, url in zip(turns, pixels, urls, strict=True):
            inputs = {"QUERY": texts([rendered(each)]), "REQUEST_OUTPUT_LEN": int32([max_tokens])}
            answer = infer(message("preprocessing", inputs | {"IMAGE_BYTES": first, "IMAGE_URL": url}))
            ids = {"input_ids": output(answer, "INPUT_ID"), "input_lengths": output(answer, "REQUEST_INPUT_LEN")}
            given.append(ask | ids | {"image_bytes_input": first, "image_url_input": url})
        assert [each["input_ids"][0].tolist() for each in given] == prompts
        assert [each["input_lengths"].tolist() for each in given] == [[[len(each)]] for each in prompts]
        beside = chat_message([("user", ["None at all"])], NUM_LONG_TOKENS)
        with ThreadPoolExecutor(2) as threads:
            running: list[Future[triton_pb2.ModelInferResponse]] = []

            def kill() -> None:
                if not running:
                    running.extend(threads.submit(infer, message("tensorrt_llm", each)) for each in given)
                    server.cluster.kill("dense_worker", "attn_worker")

            collect_all(server.cluster.gateway, [beside], kill)
            answers = [each.result() for each in running]
        for each, answer, prompt in zip(turns, answers, prompts, strict=True):
            tokens = server.expected(each, max_tokens)
            assert output(answer, "output_ids").tolist() == [[[*prompt, *tokens]]]
        with pytest.raises(grpc.RpcError, match="places for pictures"):  # a picture of another size
            infer(message("tensorrt_llm", given[0] | {"image_bytes_input": pixels[1]}))
        many = np.zeros((1, 100_000, 1, 1, 3), dtype=np.uint8)
        for model, name in (("preprocessing", "IMAGE_BYTES"), ("tensorrt_llm", "image_bytes_input")):
            inputs = {"QUERY": texts(["a"]), "REQUEST_OUTPUT_LEN": int32([1])} if name.isupper() else given[0]
            with pytest.raises(grpc.RpcError, match=r"has 10000[01] pictures, gateway\.max_images is 16"):
                infer(message(model, inputs | {name: many}))
            with pytest.raises(grpc.RpcError, match="image"):
                infer(message(model, inputs | {name: many[:, :1, :0]}))
    server.cluster.wait_idle()


def test_hostile_pictures_disturb_no_stream(server: Server) -> None:
    turns: list[Turn] = [("user", [FIRST, "What?"])]
    head = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}
    urls = [
        "data:image/png;base64,AAAA",
        data_url(FIRST)[:200],
        "http://127.0.0.1:1/a.png",
        "http://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
    ]

    def send_all() -> None:
        with openai_client(server.cluster) as api:
            for url in urls:
                head["content"][0]["image_url"]["url"] = url
                with pytest.raises(openai.BadRequestError):
                    api.chat.completions.create(model="model", messages=[head], max_tokens=1)

    [found] = collect_all(server.cluster.gateway, [chat_message(turns, NUM_LONG_TOKENS)], send_all)
    assert found.token_ids[0] == server.expected(turns, NUM_LONG_TOKENS)


@pytest.mark.parametrize(
    "roles", [("dense_worker",), ("attn_worker",), ("dense_worker", "attn_worker")], ids=" and ".join
)
def test_streams_survive_kills(server: Server, roles: tuple[str, ...]) -> None:
    chats: list[list[Turn]] = [
        [("user", [FIRST, "What?"])],
        [("user", ["Both ", SECOND, THIRD])],
        [("user", ["None at all"])],
        [("user", [FIRST, FIRST, "again"])],
        [("user", [LARGE, "large"])],
    ]
    messages = [chat_message(turns, NUM_LONG_TOKENS) for turns in chats]
    found = collect_all(server.cluster.gateway, messages, lambda: server.cluster.kill(*roles))
    for turns, each in zip(chats, found, strict=True):
        assert each.token_ids[0] == server.expected(turns, NUM_LONG_TOKENS)
    server.cluster.wait_idle()


def test_a_beam_search_survives_a_kill_of_both_workers(server: Server) -> None:
    turns: list[Turn] = [("user", [FIRST, "What?"])]
    rows, _ = Truth(server.model).generate(turns, NUM_LONG_TOKENS, num_beams=3, num_return_sequences=3)
    message = beams_message(turns, NUM_LONG_TOKENS, num_beams=3)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(server.cluster.gateway.Generate, message, timeout=REQUEST_TIMEOUT_S)

        def kill() -> None:
            if not was_running:
                was_running.append(answer.running())
                server.cluster.kill("dense_worker", "attn_worker")

        was_running: list[bool] = []
        beside = chat_message([("user", [SECOND, "And?"])], NUM_LONG_TOKENS)
        collect_all(server.cluster.gateway, [beside], kill)
        assert [list(each.token_ids) for each in answer.result().completions] == rows
    assert was_running == [True]
    server.cluster.wait_idle()


def test_many_clients_get_their_tokens_while_a_process_that_decodes_is_killed(server: Server) -> None:
    """It is idle, or has a picture, which another one then decodes. A picture that loses two is refused."""

    def chat(index: int) -> list[Turn]:
        return [("user", [noise(40 + index, 30, 10 + index), "and", noise(30, 40 + index, 50 + index), f"{index}?"])]

    early, late = [chat(index) for index in range(4)], [chat(index) for index in range(4, 12)]
    answers: list[list[int]] = []

    def kill_decoder() -> None:
        children = children_of(server.cluster.pid_of("gateway"))
        decoders = [each for each in children if "services.gateway.images.decode" in command_of(each)]
        assert decoders, "pictures were decoded"
        with ThreadPoolExecutor(len(late)) as threads:
            generate = server.cluster.gateway.Generate
            asked = [threads.submit(generate, chat_message(each, 20), timeout=REQUEST_TIMEOUT_S) for each in late]
            os.kill(decoders[0], signal.SIGKILL)
            answers.extend(list(each.result().completions[0].token_ids) for each in asked)

    found = collect_all(server.cluster.gateway, [chat_message(each, NUM_LONG_TOKENS) for each in early], kill_decoder)
    for turns, collected in zip(early, found, strict=True):
        assert collected.token_ids[0] == server.expected(turns, NUM_LONG_TOKENS)
    assert answers == [server.expected(turns, 20) for turns in late]
    server.cluster.wait_idle()


def command_of(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
