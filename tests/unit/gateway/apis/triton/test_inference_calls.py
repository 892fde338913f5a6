"""Inference over gRPC in front of a scripted dense worker: tensors, batches, streams, stops and cancelled calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest

from services.pb import triton_pb2, triton_pb2_grpc
from tests.support.clients.gateway_calls import ids, text_of, with_gateway
from tests.support.clients.inference_messages import (
    ASK,
    ASK_IDS,
    ENDLESS,
    PROMPT,
    PROMPT_IDS,
    STOP,
    TOKENS,
    Request,
    int32,
    message,
    output,
    texts,
    with_stub,
)
from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense


def test_the_three_steps_give_what_the_ensemble_gives(tmp_path: Path) -> None:
    async def test(stub: triton_pb2_grpc.GRPCInferenceServiceStub) -> None:
        words = {"BAD_WORDS_DICT": texts(["cat"]), "STOP_WORDS_DICT": texts([""])}
        first = await stub.ModelInfer(
            message("preprocessing", {"QUERY": texts([PROMPT]), "REQUEST_OUTPUT_LEN": int32([len(TOKENS)]), **words})
        )
        assert output(first, "INPUT_ID").tolist() == [PROMPT_IDS]
        nothing = {"QUERY": texts([""]), "REQUEST_OUTPUT_LEN": int32([1])}
        empty = await stub.ModelInfer(message("preprocessing", nothing))
        assert output(empty, "INPUT_ID").tolist() == [PROMPT_IDS[:1]]  # BOS, as from the tokenizer itself
        bad_ids, bad_ends = output(first, "BAD_WORDS_IDS")[0]
        assert bad_ids[: bad_ends[0]].tolist() == ids("cat")
        second = await stub.ModelInfer(
            message(
                "tensorrt_llm",
                {
                    "input_ids": output(first, "INPUT_ID"),
                    "input_lengths": output(first, "REQUEST_INPUT_LEN"),
                    "request_output_len": output(first, "REQUEST_OUTPUT_LEN"),
                    "bad_words_list": output(first, "BAD_WORDS_IDS"),
                    "stop_words_list": output(first, "STOP_WORDS_IDS"),
                },
            )
        )
        assert output(second, "output_ids").tolist() == [[[*PROMPT_IDS, *TOKENS]]]
        assert output(second, "sequence_length").tolist() == [[len(PROMPT_IDS) + len(TOKENS)]]
        third = await stub.ModelInfer(
            message(
                "postprocessing",
                {"TOKENS_BATCH": output(second, "output_ids"), "SEQUENCE_LENGTH": output(second, "sequence_length")},
            )
        )
        whole = await stub.ModelInfer(message("ensemble", ASK, id="mine"))
        assert output(third, "OUTPUT") == output(whole, "text_output") == [text_of([*PROMPT_IDS, *TOKENS])]
        assert (whole.id, whole.model_name, whole.model_version) == ("mine", "ensemble", "1")

    with_stub(tmp_path, test)


def test_a_batch_has_a_row_for_each_prompt(tmp_path: Path) -> None:
    lengths = [3, 5, 2]

    async def test(stub: triton_pb2_grpc.GRPCInferenceServiceStub) -> None:
        batch = {
            "input_ids": int32(*[PROMPT_IDS] * 3),
            "input_lengths": int32(*[[length] for length in lengths]),
            "request_output_len": int32([1], [2], [3]),
            "pad_id": int32([7], [7], [7]),
            "return_log_probs": np.array([[True]] * 3),
        }
        response = await stub.ModelInfer(message("tensorrt_llm", batch))
        expected = [PROMPT_IDS[:length] + TOKENS[: i + 1] for i, length in enumerate(lengths)]
        longest = max(map(len, expected))
        assert output(response, "output_ids").tolist() == [[each + [7] * (longest - len(each))] for each in expected]
        assert output(response, "sequence_length").tolist() == [[len(each)] for each in expected]
        assert output(response, "output_log_probs").shape == (3, 1, 3)
        assert output(response, "batch_index").tolist() == [[0], [1], [2]]

    with_stub(tmp_path, test)


def test_typed_contents_and_named_outputs(tmp_path: Path) -> None:
    async def test(stub: triton_pb2_grpc.GRPCInferenceServiceStub) -> None:
        text = triton_pb2.InferTensorContents(bytes_contents=[PROMPT.encode()])
        count = triton_pb2.InferTensorContents(int_contents=[2])
        names = ["sequence_index", "text_output"]
        response = await stub.ModelInfer(
            Request(
                model_name="ensemble",
                inputs=[
                    Request.InferInputTensor(name="text_input", datatype="BYTES", shape=[1, 1], contents=text),
                    Request.InferInputTensor(name="max_tokens", datatype="INT32", shape=[1, 1], contents=count),
                ],
                outputs=[Request.InferRequestedOutputTensor(name=name) for name in names],
            )
        )
        assert [each.name for each in response.outputs] == names
        assert output(response, "text_output") == [text_of([*PROMPT_IDS, *TOKENS[:2]])]

    with_stub(tmp_path, test)


async def stream_of(
    stub: triton_pb2_grpc.GRPCInferenceServiceStub, requests: Sequence[Request]
) -> list[triton_pb2.ModelStreamInferResponse]:
    return [response async for response in stub.ModelStreamInfer(iter(requests))]


def test_a_stream_runs_several_requests_and_survives_a_wrong_one(tmp_path: Path) -> None:
    async def test(stub: triton_pb2_grpc.GRPCInferenceServiceStub) -> None:
        stream = np.array([[True]])
        responses = await stream_of(
            stub,
            [
                message("ensemble", {**ASK, "stream": stream}, id="text"),
                message("ensemble", {**ASK, "max_tokens": int32([-1])}, id="wrong"),
                message("tensorrt_llm", {**ASK_IDS, "streaming": stream}, id="ids"),
                message("ensemble", ASK, id="whole"),
            ],
        )
        of_id: dict[str, list[triton_pb2.ModelStreamInferResponse]] = {}
        for response in responses:
            of_id.setdefault(response.infer_response.id, []).append(response)
        assert "max_tokens is -1" in of_id["wrong"][0].error_message and len(of_id["wrong"]) == 1
        pieces = [output(each.infer_response, "text_output")[0] for each in of_id["text"]]
        assert "".join(pieces) == text_of([*PROMPT_IDS, *TOKENS]).removeprefix(PROMPT) and len(pieces) > 1
        got = [token for each in of_id["ids"] for token in output(each.infer_response, "output_ids")[0, 0].tolist()]
        assert got == TOKENS
        assert [output(each.infer_response, "text_output") for each in of_id["whole"]] == [
            [text_of([*PROMPT_IDS, *TOKENS])]
        ]
        for found in of_id.values():
            finals = [each.infer_response.parameters["triton_final_response"].bool_param for each in found]
            assert finals == [False] * (len(found) - 1) + [True]

    dense = FakeDense(lambda submit: TOKENS, step_s=0.02)
    with_stub(tmp_path, test, dense)


@pytest.mark.parametrize("is_stream", [True, False])
def test_stop_ends_a_request_that_answers_with_what_it_has(tmp_path: Path, is_stream: bool) -> None:
    dense = FakeDense(lambda submit: [TOKENS[0]] * 5000, step_s=0.001)

    async def test(stub: triton_pb2_grpc.GRPCInferenceServiceStub) -> None:
        stop = message("tensorrt_llm", STOP, id="one")
        if is_stream:

            async def requests() -> AsyncIterator[Request]:
                yield message("tensorrt_llm", ENDLESS, id="one")
                await until(lambda: bool(dense.submits))
                yield stop

            responses = [each async for each in stub.ModelStreamInfer(requests())]
            assert not any(each.error_message for each in responses)
            lengths = [len(each.infer_response.outputs) for each in responses]
            assert lengths.count(0) == 1, "the answer to the stop has no outputs"
            assert len(responses) < 1900
        else:
            inputs = {**ENDLESS, "streaming": np.array([[False]])}
            running = stub.ModelInfer(message("tensorrt_llm", inputs, id="one"))
            await until(lambda: bool(dense.submits))
            ended: list[str] = []
            stopping = stub.ModelInfer(stop)
            running.add_done_callback(lambda _: ended.append("request"))
            stopping.add_done_callback(lambda _: ended.append("stop"))
            assert not (await stopping).outputs
            assert output(await running, "sequence_length")[0, 0] < len(PROMPT_IDS) + 1900
            await until(lambda: len(ended) == 2)
            assert ended == ["stop", "request"], "TensorRT-LLM's client expects this order"
        await until(lambda: bool(dense.cancelled_seq_ids))
        assert len(dense.cancelled_seq_ids) == 1

    with_stub(tmp_path, test, dense)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_cancelled_call_ends_its_requests(tmp_path: Path, is_stream: bool) -> None:
    dense = FakeDense(lambda submit: [TOKENS[0]] * 5000, step_s=0.001)

    async def test(stub: triton_pb2_grpc.GRPCInferenceServiceStub) -> None:
        inputs = {**ENDLESS, "streaming": np.array([[is_stream]])}
        request = message("tensorrt_llm", inputs)
        call = stub.ModelStreamInfer(iter([request, request])) if is_stream else stub.ModelInfer(request)
        count = 2 if is_stream else 1
        await until(lambda: len(dense.submits) == count)
        call.cancel()
        await until(lambda: len(dense.cancelled_seq_ids) == count)

    with_stub(tmp_path, test, dense)


def test_unknown_models_and_versions(tmp_path: Path) -> None:
    async def test(stub: triton_pb2_grpc.GRPCInferenceServiceStub) -> None:
        for request in (message("llama", ASK), message("ensemble", ASK, model_version="7")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ModelInfer(request)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert (await stub.ModelInfer(message("ensemble", ASK, model_version="1"))).outputs
        assert not (await stub.ModelReady(triton_pb2.ModelReadyRequest(name="llama"))).ready
        assert (await stub.ModelReady(triton_pb2.ModelReadyRequest(name="ensemble"))).ready

    with_stub(tmp_path, test)


def test_an_idle_stream_ends_and_a_busy_one_does_not(tmp_path: Path) -> None:
    async def body(gateway: RunningGateway) -> None:
        stub = triton_pb2_grpc.GRPCInferenceServiceStub(gateway.channel)

        async def one_request() -> AsyncIterator[Request]:
            yield message("ensemble", {**ASK, "stream": np.array([[True]])})
            await asyncio.sleep(100)

        nums_responses: list[int] = []
        while max(nums_responses, default=0) <= 3:  # a busy machine may stop this process for as long as the limit
            assert len(nums_responses) < 5, nums_responses
            nums_responses.append(0)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.ModelStreamInfer(one_request()):
                    nums_responses[-1] += 1
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    dense = FakeDense(lambda submit: TOKENS, step_s=0.3)  # longer than the limit, all together
    with_gateway(tmp_path, dense, body, grpc_idle_timeout_s=1.2)
