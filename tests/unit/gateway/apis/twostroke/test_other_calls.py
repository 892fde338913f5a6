"""The gateway's calls other than generation, and requests that it refuses to generate."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.support.clients.gateway_calls import (
    ANSWER,
    EOS,
    REFERENCE,
    ids,
    request,
    say,
    stream,
    with_gateway,
)
from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense


def test_tokenize_returns_the_prompt_of_the_model(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        text = await gateway.stub.Tokenize(gateway_pb2.TokenizeRequest(text=ANSWER))
        assert text.token_ids == REFERENCE(ANSWER)["input_ids"]
        assert text.tokens == REFERENCE.convert_ids_to_tokens(text.token_ids)
        chat = {"messages": [{"role": "user", "content": "Hi!"}]}
        tokens = await gateway.stub.Tokenize(gateway_pb2.TokenizeRequest(chat=chat))
        expected = REFERENCE.apply_chat_template(
            chat["messages"], add_generation_prompt=True, return_dict=False
        )
        assert tokens.token_ids == expected
        await stream(gateway, chat=chat, max_tokens=1)
        assert dense.submits[-1].spec.prompt_token_ids == expected

    dense = FakeDense(say(ids("Hello")))
    with_gateway(tmp_path, dense, test)


def test_model_info_describes_the_model_and_its_limits(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        info = await gateway.stub.ModelInfo(gateway_pb2.ModelInfoRequest())
        assert info.model == EMBEDDED_MODEL.name
        assert (info.family, info.dtype, info.num_layers) == ("llama", "float32", 2)
        assert (info.vocab_size, info.max_model_len) == (32_000, 2048)
        assert info.eos_token_ids == [EOS]
        assert info.weights_hash == "c0ffee"
        assert info.version

    with_gateway(tmp_path, FakeDense(say([])), test)


def reflection_call(gateway: RunningGateway, version: str) -> grpc.aio.StreamStreamMultiCallable:
    """A call of either version of reflection. Their messages have the same wire format."""
    return gateway.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
def test_reflection_describes_every_service_that_it_lists(tmp_path: Path, version: str) -> None:
    async def test(gateway: RunningGateway) -> None:
        ask = reflection_call(gateway, version)
        question = reflection_pb2.ServerReflectionRequest
        [listed] = [response async for response in ask(iter([question(list_services="")]))]
        names = {service.name for service in listed.list_services_response.service}
        reflections = {f"grpc.reflection.{each}.ServerReflection" for each in ("v1alpha", "v1")}
        own = {"twostroke.v1.Gateway", "inference.GRPCInferenceService"}
        assert names == {*own, "grpc.health.v1.Health", *reflections}
        for name in names:
            [answer] = [response async for response in ask(iter([question(file_containing_symbol=name)]))]
            pool = descriptor_pool.DescriptorPool()  # an empty pool, so a file missing in the answer is an error
            for file in reversed(answer.file_descriptor_response.file_descriptor_proto):
                pool.AddSerializedFile(file)
            for method in pool.FindServiceByName(name).methods:
                assert method.input_type.full_name.startswith(name.rpartition(".")[0])

    with_gateway(tmp_path, FakeDense(say([])), test)


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
@pytest.mark.parametrize("num_questions", [0, 1])
def test_an_idle_reflection_call_ends_in_bounded_time(tmp_path: Path, version: str, num_questions: int) -> None:
    """Such a call needs no API key, so it must not stay open."""

    async def test(gateway: RunningGateway) -> None:
        call = reflection_call(gateway, version)(timeout=20.0)
        for _ in range(num_questions):
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            assert (await call.read()).HasField("list_services_response")
        with pytest.raises(grpc.aio.AioRpcError, match=r"not complete within 1 s") as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    with_gateway(tmp_path, FakeDense(say([])), test, body_timeout_s=1.0)


def test_an_aborted_answer_returns_the_tokens_so_far(tmp_path: Path) -> None:
    dense = FakeDense(say(ids(ANSWER) * 100), step_s=0.002)

    async def test(gateway: RunningGateway) -> None:
        call = gateway.stub.GenerateStream(request(max_tokens=1000, request_id="mine"))
        chunks = []
        async for chunk in call:
            if not chunks:
                reply = await gateway.stub.Abort(gateway_pb2.AbortRequest(request_id="mine"))
                assert reply.was_running
            chunks.append(chunk)
        assert chunks[-1].finish.reason == gateway_pb2.FINISH_REASON_ABORT
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        assert token_ids == (ids(ANSWER) * 100)[: len(token_ids)]
        assert chunks[-1].finish.usage.num_output_tokens == len(token_ids)
        await until(lambda: len(dense.cancelled_seq_ids) == 1)
        assert not (await gateway.stub.Abort(gateway_pb2.AbortRequest(request_id="mine"))).was_running

    with_gateway(tmp_path, dense, test)


def test_the_best_of_several_answers_cannot_be_streamed(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="best_of is 3 and n is 1"):
            await gateway.stub.GenerateStream(request(best_of=3)).read()

    with_gateway(tmp_path, FakeDense(say(ids(ANSWER))), test)


def test_a_request_for_another_model_is_not_found(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="'gpt' is not served here, 'tiny-llama' is") as caught:
            await gateway.stub.Generate(request(model="gpt"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    with_gateway(tmp_path, FakeDense(say(ids(ANSWER))), test)


def test_detokenize_is_the_inverse_of_tokenize(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        token_ids = (await gateway.stub.Tokenize(gateway_pb2.TokenizeRequest(text=ANSWER))).token_ids
        plain = gateway_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=True)
        assert (await gateway.stub.Detokenize(plain)).text == ANSWER
        with pytest.raises(grpc.aio.AioRpcError, match=r"token_ids\[0\] is 4000000000"):
            await gateway.stub.Detokenize(gateway_pb2.DetokenizeRequest(token_ids=[4_000_000_000]))
        with pytest.raises(grpc.aio.AioRpcError, match="token_ids has 2049 tokens, max_model_len is 2048"):
            await gateway.stub.Detokenize(gateway_pb2.DetokenizeRequest(token_ids=[5] * 2049))

    with_gateway(tmp_path, FakeDense(say(ids(ANSWER))), test)
