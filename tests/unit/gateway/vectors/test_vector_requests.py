"""Requests for vectors through a whole gateway: what counts towards limits, and what is computed first."""

from __future__ import annotations

import asyncio
import base64
import json
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import grpc
import httpx2
import numpy as np
import pytest
import torch

from services.common.config import EMBEDDED_MODEL
from services.gateway.apis.vectors import tei_routes
from services.gateway.core.generation import Generation
from services.gateway.core.request_service import RequestService
from services.gateway.vectors import vectors
from services.pb import dense_pb2, gateway_pb2
from tests.support.clients.gateway_calls import REFERENCE, ids
from tests.support.clients.http_gateway import COMPLETIONS, check_error, with_client
from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense, fake_vector

EMBEDDINGS = "/v1/embeddings"
HEADERS = {"authorization": "Bearer ann-ann-ann-ann-ann"}


def keys_file(directory: Path, limits: str) -> Path:
    file = directory / "keys.toml"
    file.write_text(f'[[keys]]\nname = "ann"\nkey = "ann-ann-ann-ann-ann"\n{limits}\n')
    return file


def serve(directory: Path, test: Any, *, limits: str = "", **options: Any) -> FakeDense:
    dense = FakeDense(lambda submit: ids(" a") * 2000, step_s=0.001)
    with_client(directory, dense, test, runner="pooling", api_keys_file=keys_file(directory, limits), **options)
    return dense


async def embed(client: httpx2.AsyncClient, prompts: list[list[int]], **fields: Any) -> httpx2.Response:
    return await client.post(EMBEDDINGS, json={"input": prompts} | fields, headers=HEADERS)


PROMPTS = [[10 + i, 11] for i in range(20)]


def test_inputs_beside_a_stream_count_as_one_answer(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": "a", "max_tokens": 1500, "stream": True}
        async with client.stream("POST", COMPLETIONS, json=body, headers=HEADERS) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            response = await embed(client, PROMPTS, normalize=False)
            assert response.status_code == 200, response.text
            found = [each["embedding"] for each in response.json()["data"]]
            np.testing.assert_allclose(found, [fake_vector(each) for each in PROMPTS], atol=1e-6)
            async with client.stream("POST", COMPLETIONS, json=body, headers=HEADERS) as second:
                await anext(second.aiter_lines())
                refused = await embed(client, PROMPTS)  # all of them or none
                assert refused.status_code == 429 and "would have 3 answers" in refused.text
            await anext(lines)  # the first one still runs

    dense = serve(tmp_path, test, limits="max_concurrent_answers = 2")
    assert len(dense.submits) == 2 + len(PROMPTS)


def test_a_body_may_name_its_request(tmp_path: Path) -> None:
    bodies = {EMBEDDINGS: {"input": "a"}, "/pooling": {"input": "a"}}

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, body in bodies.items():
            response = await client.post(path, json=body | {"request_id": "mine"}, headers=HEADERS)
            assert response.json()["id"] == response.headers["x-request-id"] == "mine"
            response = await client.post(path, json=body | {"request_id": "a b"}, headers=HEADERS)
            check_error(response, 400, "request_id", "has 3 bytes")

    dense = serve(tmp_path, test)
    assert [each.spec.request_id for each in dense.submits] == ["mine"] * len(bodies)


def test_inputs_of_llama_cpp_mix_token_ids_and_texts(tmp_path: Path) -> None:
    """A text at the start of an input gets special tokens, others do not; objects are texts."""
    whole, bare = REFERENCE(" a")["input_ids"], ids(" a")
    part = {"type": "text", "text": " a"}
    truth = [
        ([12, " a", 56], [[12, *bare, 56]]),
        ([[" a", 12]], [[*whole, 12]]),
        ([[12, 34], [12, " a"], " a"], [[12, 34], [12, *bare], whole]),
        ([" a", [12]], [whole, [12]]),
        ({"prompt_string": " a"}, [whole]),
        ({"content": [{"type": "text", "text": " "}, {"type": "text", "text": "a"}]}, [whole]),
        ([" a", {"prompt_string": " a"}, {"content": [part]}], [whole] * 3),
    ]
    wrong: list[tuple[Any, str]] = [
        ([" a", {"other": 1}], "input[1]"),
        ([" a", 12], "input[1]"),
        ({"content": " a"}, "input"),
        ({"content": [part, {"type": "input_audio", "input_audio": {}}]}, "input"),
        ([[12, 1.5]], "input[0][1]"),
        ([12, " a", 10**6], "input"),
        ([[12, *[" a"] * 65]], "input[0]"),
    ]
    without: list[tuple[Any, list[int]]] = [
        ([[" a", 12]], [*bare, 12]),
        ({"prompt_string": " a"}, bare),
        ({"content": [part]}, bare),
    ]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for given, tokens in truth:
            answer = (await client.post(EMBEDDINGS, json={"input": given, "normalize": False}, headers=HEADERS)).json()
            found = [each["embedding"] for each in answer["data"]]
            np.testing.assert_allclose(found, [fake_vector(each) for each in tokens], atol=1e-6)
        for given, tokens in without:
            body = {"input": given, "normalize": False, "add_special_tokens": False}
            [found] = (await client.post(EMBEDDINGS, json=body, headers=HEADERS)).json()["data"]
            np.testing.assert_allclose(found["embedding"], fake_vector(tokens), atol=1e-6)
        many = await client.post(EMBEDDINGS, json={"input": {"content": [part] * 65}}, headers=HEADERS)
        assert many.status_code == 400 and "65 parts, at most 64" in many.json()["error"]["message"]
        plain = await client.post("/embedding", json={"content": [12, " a"], "embd_normalize": -1}, headers=HEADERS)
        np.testing.assert_allclose(plain.json()[0]["embedding"], [fake_vector([12, *bare])], atol=1e-6)
        for given, param in wrong:
            refused = await client.post(EMBEDDINGS, json={"input": given}, headers=HEADERS)
            assert refused.status_code == 400, given
            assert refused.json()["error"]["param"] == param, refused.text

    serve(tmp_path, test)


@pytest.mark.parametrize("path", [EMBEDDINGS, "/embed"])
def test_vectors_that_are_aborted_are_an_error_of_the_client(tmp_path: Path, path: str) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        name = "input" if path == EMBEDDINGS else "inputs"
        other = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 5}))
        await until(lambda: any(each.num_output_tokens for each in dense.running.values()))
        vectors = asyncio.create_task(client.post(path, json={name: PROMPTS[:2]}))
        await until(lambda: len(dense.running) == 3)  # the vectors would come with the next step
        assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 200
        check_error(await vectors, 499, None, "aborted before it had its vector")
        assert (await other).json()["choices"][0]["finish_reason"] == "abort"

    dense = FakeDense(lambda submit: [70] * 5, step_s=60)
    with_client(tmp_path, dense, test, runner="pooling")


def test_embed_answers_as_text_embeddings_inference(tmp_path: Path) -> None:
    texts = [" a b", " c"]
    truth = [fake_vector(REFERENCE(text)["input_ids"]) for text in texts]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async def embed(**body: Any) -> Any:
            return (await client.post("/embed", json=body, headers=HEADERS)).json()

        np.testing.assert_allclose(await embed(inputs=texts, normalize=False), truth, atol=1e-6)
        unit = [each / np.linalg.norm(each) for each in truth]
        np.testing.assert_allclose(await embed(inputs=texts), unit, atol=1e-6)
        np.testing.assert_allclose(await embed(inputs=texts[1], truncate=True), unit[1:], atol=1e-6)
        cut = await embed(inputs=texts, dimensions=2)
        np.testing.assert_allclose(cut, [each[:2] / np.linalg.norm(each[:2]) for each in truth], atol=1e-6)
        long = " a" * 5000
        error = (await embed(inputs=[texts[0], long]))["error"]
        assert error["param"] == "inputs[1]" and error["type"] == "invalid_request_error"
        assert [len(each) for each in await embed(inputs=[texts[0], long], truncate=True)] == [len(truth[0])] * 2

    serve(tmp_path, test)


def test_vectors_are_normalised_unless_the_client_says_otherwise(tmp_path: Path) -> None:
    truth = fake_vector(PROMPTS[0])
    unit = truth / np.linalg.norm(truth)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for name in ("use_activation", "normalize"):
            for value, expected in ((None, unit), (True, unit), (False, truth)):
                for path, field in ((EMBEDDINGS, "embedding"), ("/pooling", "data")):
                    answer = await client.post(path, json={"input": PROMPTS[:1], name: value}, headers=HEADERS)
                    np.testing.assert_allclose(answer.json()["data"][0][field], expected, atol=1e-6)

    serve(tmp_path, test)


def test_other_routes_answer_as_text_embeddings_inference(tmp_path: Path) -> None:
    texts = [" a b", " c", " a b"]
    lists = [REFERENCE(text)["input_ids"] for text in texts]
    truth = [fake_vector(each) for each in lists]
    unit = [each / np.linalg.norm(each) for each in truth]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async def post(path: str, **body: Any) -> Any:
            return (await client.post(path, json=body, headers=HEADERS)).json()

        np.testing.assert_allclose(await post("/embed", inputs=lists), unit, atol=1e-6)
        np.testing.assert_allclose(await post("/embed", inputs=lists[0]), unit[:1], atol=1e-6)
        np.testing.assert_allclose(await post("/", inputs=texts), unit, atol=1e-6)
        sentences = {"source_sentence": texts[0], "sentences": texts[1:]}
        cosines = [float(unit[0] @ each) for each in unit[1:]]
        for path in ("/similarity", "/"):
            assert await post(path, inputs=sentences) == pytest.approx(cosines, abs=1e-6)
        ranks = await post("/", query=texts[0], texts=texts[1:])
        assert [each["index"] for each in ranks] == [1, 0] and ranks[0]["score"] == pytest.approx(1, abs=1e-6)
        special = [REFERENCE.bos_token_id, *REFERENCE(" hello", add_special_tokens=False)["input_ids"]]
        shown = [REFERENCE.decode(special, skip_special_tokens=each) for each in (True, False)]
        assert shown[0] != shown[1]
        assert await post("/decode", ids=special) == shown[:1]
        assert await post("/decode", ids=[special, special], skip_special_tokens=False) == shown[1:] * 2
        assert "no classifier" in (await post("/predict", inputs="a"))["error"]["message"]
        assert (await post("/embed", inputs="a", prompt_name="query"))["error"]["param"] == "prompt_name"
        info = (await client.get("/info", headers=HEADERS)).json()
        assert info["model_type"] == {"embedding": {"pooling": "last"}} and info["max_input_length"] >= 2000
        assert (await client.get("/")).status_code == 200  # the page
        assert (await client.post("/", json={"inputs": "a"})).status_code == 401

    serve(tmp_path, test)


def test_large_texts_of_decode_are_written_in_pieces(tmp_path: Path) -> None:
    long = REFERENCE.encode(" hello" * 1000, add_special_tokens=False)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for num_lists, is_large in ((1, False), (20, True)):
            answer = await client.post("/decode", json={"ids": [long[:1000]] * num_lists}, headers=HEADERS)
            assert answer.json() == [REFERENCE.decode(long[:1000])] * num_lists
            assert answer.headers["content-type"] == "application/json"
            assert (answer.headers.get("transfer-encoding") == "chunked") is is_large

    serve(tmp_path, test)


def test_tokens_of_texts_behind_a_prompt_of_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in EMBEDDED_MODEL.iterdir():
        (model / file.name).symlink_to(file)
    (model / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "Find: "}}))

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async def tokens(**body: Any) -> Any:
            return (await client.post("/tokenize", json=body, headers=HEADERS)).json()

        assert await tokens(inputs=["a", "b"], prompt_name="query") == await tokens(inputs=["Find: a", "Find: b"])
        assert await tokens(inputs="a", prompt_name="query") == await tokens(inputs="Find: a")
        error = (await tokens(inputs="a", prompt_name="other"))["error"]
        assert error["param"] == "prompt_name" and "no prompt 'other', it has: query" in error["message"]

    serve(tmp_path, test, model=model)


@pytest.mark.parametrize("num_sentences", [200, 5000])
def test_a_long_text_with_a_prompt_is_not_copied_for_each_that_it_is_compared_with(
    num_sentences: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tei_routes.PromptFields, "prefix", lambda self, prompts: "query: ")
    inputs = {"source_sentence": "a" * 100_000, "sentences": ["b"] * num_sentences}

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        tracemalloc.start()
        try:
            refused = await client.post("/similarity", json={"inputs": inputs}, headers=HEADERS)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert refused.status_code == 400 and peak < 10 * 2**20, (refused.text, peak)

    serve(tmp_path, test)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_numbers_in_base64_have_the_dtype_and_the_order_of_bytes_that_are_asked_for(dtype: str, tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for field, path in (("embedding", EMBEDDINGS), ("data", "/pooling")):
            body = {"input": PROMPTS, "normalize": False, "encoding_format": "base64", "embed_dtype": dtype}
            for endianness in (None, "native", "little", "big"):
                answer = await client.post(path, json=body | {"endianness": endianness}, headers=HEADERS)
                for prompt, each in zip(PROMPTS, answer.json()["data"], strict=True):
                    name = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(dtype, dtype)
                    values = torch.tensor(fake_vector(prompt)).to(getattr(torch, name))
                    expected = values.view(torch.uint8).numpy()
                    if endianness == "big":
                        expected = expected.reshape(len(values), -1)[:, ::-1]
                    assert base64.b64decode(each[field]) == expected.tobytes()
        refused = await embed(client, PROMPTS, encoding_format="base64", embed_dtype="fp8")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "embed_dtype"

    serve(tmp_path, test)


def test_an_answer_may_be_bytes_with_the_rest_in_a_header(tmp_path: Path) -> None:
    truth = torch.tensor(np.array([fake_vector(each) for each in PROMPTS]))

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, dtype in ((EMBEDDINGS, "float32"), ("/pooling", "fp8_e4m3")):
            body = {"input": PROMPTS, "normalize": False, "encoding_format": "bytes", "embed_dtype": dtype}
            answer = await client.post(path, json=body, headers=HEADERS)
            assert answer.headers["content-type"] == "application/octet-stream"
            metadata = json.loads(answer.headers["metadata"])
            assert metadata["usage"]["prompt_tokens"] == 2 * len(PROMPTS) and metadata["model"]
            kind = torch.float32 if dtype == "float32" else torch.float8_e4m3fn
            for index, (each, wanted) in enumerate(zip(metadata["data"], truth, strict=True)):
                assert (each["index"], each["embed_dtype"], each["endianness"]) == (index, dtype, "native")
                found = torch.frombuffer(bytearray(answer.content[each["start"] : each["end"]]), dtype=kind)
                assert torch.equal(found.float(), wanted.to(kind).float()) and each["shape"] == [len(wanted)]
            bare = await client.post(path, json=body | {"encoding_format": "bytes_only"}, headers=HEADERS)
            assert "metadata" not in bare.headers and bare.content == answer.content
        num_computed = len(dense.submits)
        many = await embed(client, [[5]] * 1000, encoding_format="bytes")
        assert many.status_code == 400 and "bytes_only" in many.json()["error"]["message"]
        assert len(dense.submits) == num_computed, "it was computed first"
        assert (await embed(client, [[5]] * 1000, encoding_format="bytes_only")).status_code == 200

    dense = FakeDense(lambda submit: [])
    with_client(tmp_path, dense, test, runner="pooling", api_keys_file=keys_file(tmp_path, ""))


def test_inputs_of_a_request_count_as_one_request_and_all_their_tokens(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for _ in range(2):
            assert (await embed(client, PROMPTS)).status_code == 200
        refused = await embed(client, PROMPTS)
        assert refused.status_code == 429 and "2 requests a minute" in refused.text

    serve(tmp_path, test, limits="requests_per_minute = 2")

    async def test_tokens(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        assert (await embed(client, PROMPTS)).status_code == 200
        refused = await embed(client, PROMPTS[:1])  # 40 tokens of 39 have gone
        assert refused.status_code == 429 and "39 tokens a minute" in refused.text

    serve(tmp_path, test_tokens, limits="tokens_per_minute = 39")


def test_vectors_of_all_tokens_are_counted_before_anything_is_computed(tmp_path: Path) -> None:
    """In sum over the inputs, each of which would fit."""
    prompts = [[10 + i] * 100 for i in range(60)]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        assert (await embed(client, prompts)).status_code == 200
        num_computed = len(dense.submits)
        refused = await client.post("/pooling", json={"input": prompts, "task": "token_embed"}, headers=HEADERS)
        assert refused.status_code >= 400 and "gateway.max_held_bytes" in refused.text, refused.text
        assert num_computed == len(prompts) == len(dense.submits)
        assert (await embed(client, prompts[:1])).status_code == 200

    dense = FakeDense(lambda submit: ids(" a") * 2000, step_s=0.001)
    with_client(tmp_path, dense, test, runner="pooling", api_keys_file=keys_file(tmp_path, ""), max_held_bytes=2**18)


def test_documents_and_pairs_are_counted_as_the_client_gives_them(tmp_path: Path) -> None:
    """With embeddings: equal texts are computed once, and the two of a pair each by itself."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        def scoring(num_pairs: int) -> dict[str, Any]:
            return {"text_1": [f"a{i}" for i in range(num_pairs)], "text_2": [f"b{i}" for i in range(num_pairs)]}

        for path, field, make in (
            ("/rerank", "documents", lambda count: {"query": "a", "documents": [f"b{i}" for i in range(count)]}),
            ("/rerank", "documents", lambda count: {"query": "a", "documents": ["b"] * count}),
            ("/score", "text_2", scoring),
            ("/score", "text_2", lambda count: {"text_1": "a", "text_2": ["a"] * count}),
        ):
            response = await client.post(path, json=make(8), headers=HEADERS)
            assert response.status_code == 200, response.text
            assert len(response.json()["results" if path == "/rerank" else "data"]) == 8
            error = (await client.post(path, json=make(9), headers=HEADERS)).json()["error"]
            assert error["param"] == field and f"{field} has 9 elements, must have 1 to 8" in error["message"]
        for count in (8, 9):
            pairs = [gateway_pb2.TextPair(first=f"a{i}", second=f"b{i}") for i in range(count)]
            metadata = tuple(HEADERS.items())
            call = gateway.stub.Score(gateway_pb2.ScoreRequest(pairs=pairs), metadata=metadata)
            if count == 8:
                assert len((await call).scores) == 8
            else:
                with pytest.raises(grpc.aio.AioRpcError, match="pairs has 9 elements"):
                    await call

    serve(tmp_path, test, max_inputs=8)


def test_documents_are_cut_and_the_query_is_not(tmp_path: Path) -> None:
    """Neither where it is a document, too."""
    query = " a b c d e f g h"
    assert len(ids(query)) == 8

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"query": query, "documents": [query, " a b"], "max_tokens_per_doc": 3, "add_special_tokens": False}
        response = await client.post("/rerank", json=body, headers=HEADERS)
        found = {each["index"]: each["relevance_score"] for each in response.json()["results"]}
        units = [fake_vector(each) / np.linalg.norm(fake_vector(each)) for each in wanted]
        assert [found[0], found[1]] == pytest.approx([units[0] @ units[1], units[0] @ units[2]], abs=1e-6)

    wanted = [ids(query), ids(query)[:3], ids(" a b")]
    dense = serve(tmp_path, test)
    assert sorted(list(each.spec.prompt_token_ids) for each in dense.submits) == sorted(wanted)


MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}]
WRITTEN = "<user>a b"
TEMPLATE = "{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}{{ '>' if add_generation_prompt }}"


def test_a_chat_is_one_input_as_its_template_writes_it(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"messages": MESSAGES, "chat_template": TEMPLATE}
        for path in (EMBEDDINGS, "/pooling"):
            assert (await client.post(path, json=body, headers=HEADERS)).status_code == 200
        more = {"add_generation_prompt": True, "add_special_tokens": True, "truncate_prompt_tokens": 5}
        assert (await client.post(EMBEDDINGS, json=body | more, headers=HEADERS)).json()["usage"]["prompt_tokens"] == 5
        picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        for wrong in ({"messages": picture}, {"messages": []}, {"messages": MESSAGES, "input": "a"}, {"input": []}, {}):
            response = await client.post(EMBEDDINGS, json=wrong, headers=HEADERS)
            assert response.status_code == 400, response.text

    dense = serve(tmp_path, test, trust_request_chat_template=True)
    marked = REFERENCE(WRITTEN + ">")["input_ids"][:5]
    assert [list(each.spec.prompt_token_ids) for each in dense.submits] == [ids(WRITTEN), ids(WRITTEN), marked]


def test_inputs_may_be_texts_beside_token_ids(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"input": [" a", [11, 12]], "add_special_tokens": False, "cache_salt": "ann"}
        assert len((await client.post(EMBEDDINGS, json=body, headers=HEADERS)).json()["data"]) == 2

    dense = serve(tmp_path, test)
    found = [(list(each.spec.prompt_token_ids), each.spec.cache_salt) for each in dense.submits]
    assert sorted(found) == sorted([(ids(" a"), "name:ann ann"), ([11, 12], "name:ann ann")])


def test_pairs_have_the_names_of_other_servers_and_one_route_for_all_bodies(tmp_path: Path) -> None:
    """And SageMaker's route gives what the routes of vLLM give."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async def values(path: str, body: dict[str, Any]) -> Any:
            response = await client.post(path, json=body, headers=HEADERS)
            assert response.status_code == 200, response.text
            return response.json().get("data") or response.json()["results"]

        scores = await values("/score", {"text_1": "a", "text_2": ["b", "a"]})
        for first, second in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
            assert await values("/score", {first: "a", second: ["b", "a"]}) == scores
            assert await values("/invocations", {first: "a", second: ["b", "a"]}) == scores
        for path, body in ((EMBEDDINGS, {"input": "a"}), ("/rerank", {"query": "a", "documents": ["b", "a"]})):
            assert await values("/invocations", body) == await values(path, body)
        wrong = {"queries": "a", "items": "b", "use_activation": True}
        refused = await client.post("/score", json=wrong, headers=HEADERS)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "use_activation"

    serve(tmp_path, test)


def test_an_input_is_not_cut_behind_more_tokens_than_the_model_reads(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        most = (await client.get("/v1/models", headers=HEADERS)).json()["data"][0]["max_model_len"]
        assert (await embed(client, PROMPTS[:1], truncate_prompt_tokens=most)).status_code == 200
        refused = await embed(client, PROMPTS[:1], truncate_prompt_tokens=most + 1)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "truncate_prompt_tokens"
        assert "Please request a smaller truncation size." in refused.json()["error"]["message"]

    serve(tmp_path, test)


def test_llama_cpp_gets_a_list_of_vectors(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, field, prompts in (("/embedding", "content", [11, 12]), ("/embeddings", "input", [[11, 12], [5]])):
            body = {field: prompts, "embd_normalize": -1}
            found = (await client.post(path, json=body, headers=HEADERS)).json()
            lists = [prompts] if field == "content" else prompts
            assert [each["index"] for each in found] == list(range(len(lists)))
            vectors_of = [each["embedding"][0] for each in found]
            np.testing.assert_allclose(vectors_of, list(map(fake_vector, lists)), atol=1e-6)
        [unit] = (await client.post("/embeddings", json={"input": [5]}, headers=HEADERS)).json()
        assert np.linalg.norm(unit["embedding"]) == pytest.approx(1)
        error = (await client.post("/embeddings", json={"input": "a", "embd_normalize": 3}, headers=HEADERS)).json()
        assert error["error"]["code"] == 400

    serve(tmp_path, test)


EMBED = "/v2/embed"


def test_cohere_gets_vectors_in_several_forms(tmp_path: Path) -> None:
    texts = [" a b", " c"]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body: dict[str, Any] = {"model": "tiny-llama", "texts": texts, "input_type": "search_query"}
        body["embedding_types"] = ["float", "base64", "binary", "ubinary"]
        answer = (await client.post(EMBED, json=body, headers=HEADERS)).json()
        assert answer["texts"] == texts and answer["response_type"] == "embeddings_by_type"
        tokens = [REFERENCE(text)["input_ids"] for text in texts]
        assert answer["meta"]["billed_units"] == {"input_tokens": sum(map(len, tokens))}
        found = answer["embeddings"]
        for index, each in enumerate(tokens):
            wanted = fake_vector(each) / np.linalg.norm(fake_vector(each))
            np.testing.assert_allclose(found["float"][index], wanted, atol=1e-6)
            decoded = np.frombuffer(base64.b64decode(found["base64"][index]), "<f4")
            np.testing.assert_array_equal(decoded, np.float32(found["float"][index]))
            bits = np.unpackbits(np.array(found["ubinary"][index], np.uint8))[: len(wanted)]
            np.testing.assert_array_equal(bits, wanted > 0)
            assert found["binary"][index] == [value - 128 for value in found["ubinary"][index]]
        plain = {"texts": texts, "output_dimension": 2}
        cut = (await client.post(EMBED, json=plain, headers=HEADERS)).json()["embeddings"]["float"]
        assert [len(each) for each in cut] == [2, 2]
        long = await client.post(EMBED, json=plain | {"output_dimension": 10**6}, headers=HEADERS)
        assert long.status_code == 400 and long.json()["message"].startswith("output_dimension is 1000000, the model's")
        older = (await client.post("/v1/embed", json=body, headers=HEADERS)).json()
        assert older["embeddings"] == found and older["meta"] == answer["meta"] | {"api_version": {"version": "1"}}
        older = (await client.post("/v1/embed", json={"texts": texts}, headers=HEADERS)).json()
        assert older["response_type"] == "embeddings_floats" and older["embeddings"] == found["float"]
        error = await client.post("/v1/embed", json={"texts": []}, headers=HEADERS)
        assert error.status_code == 400 and error.json().keys() == {"id", "message"}

    serve(tmp_path, test)


def test_cohere_cuts_texts_where_the_client_says(tmp_path: Path) -> None:
    text = " a b c d e f"

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for truncate in ("START", "END"):
            body = {"texts": [text], "truncate": truncate, "max_tokens": 4}
            assert (await client.post(EMBED, json=body, headers=HEADERS)).status_code == 200
        for wrong in (
            {"texts": [text], "truncate": "NONE", "max_tokens": 4},
            {"texts": ["a " * 5000], "truncate": "NONE"},
            {"texts": [text], "input_type": "nonexistent"},
            {"texts": [text], "embedding_types": ["int4"]},
            {"texts": [text], "images": ["x"]},
            {"texts": []},
            {},
        ):
            response = await client.post(EMBED, json=wrong, headers=HEADERS)
            assert response.status_code == 400 and response.json().keys() == {"id", "message"}, response.text

    dense = serve(tmp_path, test)
    [start, end] = [list(each.spec.prompt_token_ids) for each in dense.submits]
    whole = REFERENCE(text)["input_ids"]
    assert end == whole[:4] and start == [whole[0], *whole[-3:]]


class HoldingDense(FakeDense):
    """Runs nothing of a priority above that of the key until it is released."""

    is_held = True

    def _step(self, running: dict[int, Any]) -> dense_pb2.StepOutput:
        held = {
            seq_id: each for seq_id, each in running.items() if self.is_held and each.submit.spec.priority > PRIORITY
        }
        for seq_id in held:
            del running[seq_id]
        output = super()._step(running)
        running |= held
        return output

    def release(self) -> None:
        self.is_held = False
        self._updates.set()


PRIORITY = 95


def test_a_clients_small_requests_do_not_wait_for_its_bulk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "MAX_AT_ONCE", 66)
    bulk = [[5, 10 + i] for i in range(70)]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        running = asyncio.ensure_future(embed(client, bulk))
        await until(lambda: len(dense.submits) == 66)
        assert (await embed(client, PROMPTS)).status_code == 200
        body = {"prompt": "a", "max_tokens": 2}
        assert (await client.post(COMPLETIONS, json=body, headers=HEADERS)).status_code == 200
        assert {each.spec.priority for each in dense.submits[:66]} == {100}  # 105 is too late to be allowed
        assert {each.spec.priority for each in dense.submits[66:]} == {PRIORITY}
        assert not running.done()
        dense.release()
        assert (await embed(client, bulk, priority=97)).status_code == 200
        assert sum(each.spec.priority == 97 for each in dense.submits) == len(bulk)
        assert len((await running).json()["data"]) == len(bulk)

    dense = HoldingDense(lambda submit: ids(" a") * 2, step_s=0.001)
    with_client(tmp_path, dense, test, runner="pooling", api_keys_file=keys_file(tmp_path, f"priority = {PRIORITY}"))


def test_inputs_that_wait_for_a_turn_hold_nothing_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each collection of garbage would look at them, for 0.2 s beside 24 requests of 2,048 inputs."""
    monkeypatch.setattr(vectors, "MAX_AT_ONCE", 8)
    begun, most, start = list[weakref.ref[Generation]](), 0, RequestService.start

    async def counted(service: RequestService, *arguments: Any) -> Generation:
        nonlocal most
        generation = await start(service, *arguments)
        begun.append(weakref.ref(generation))
        most = max(most, sum(each() is not None for each in begun))
        return generation

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        bulk = [[[5 + i, 10 + j] for j in range(70)] for i in range(4)]
        for answer in await asyncio.gather(*(embed(client, each) for each in bulk)):
            assert len(answer.json()["data"]) == 70

    monkeypatch.setattr(RequestService, "start", counted)
    serve(tmp_path, test)
    assert len(begun) == 280 and most <= 8
