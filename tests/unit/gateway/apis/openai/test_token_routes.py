"""/tokenize, /detokenize and /tokenizer_info, compared with transformers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.support.clients import http_gateway
from tests.support.clients.gateway_calls import with_gateway
from tests.support.clients.http_clients import async_client, connect, request_bytes
from tests.support.clients.http_gateway import CHATS, USER, say
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

REFERENCE = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
TEXTS = ["San Francisco", "</s> is special here", "日本 " * 600]  # the last one is so long that a thread encodes it
CHAT = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]}]
PLAIN_CHAT = [{"role": "user", "content": "Hi there"}]


def with_client(tmp_path: Path, test: Any, **options: Any) -> None:
    async def body(gateway: RunningGateway) -> None:
        async with async_client(gateway.http_address) as client:
            await test(client, gateway)

    with_gateway(tmp_path, FakeDense(lambda submit: [5]), body, **options)


@pytest.mark.parametrize("adds", [None, True, False])
def test_one_text_and_several_texts_are_tokenized(tmp_path: Path, adds: bool | None) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        options = {"add_special_tokens": adds, "return_token_strs": True}
        expected = [REFERENCE.encode(text, add_special_tokens=adds is not False) for text in TEXTS]
        several = (await client.post("/tokenize", json={"prompt": TEXTS, **options})).json()
        assert several["tokens"] == expected and several["count"] == [len(each) for each in expected]
        assert several["token_strs"] == [REFERENCE.convert_ids_to_tokens(each) for each in expected]
        assert several["max_model_len"] == 2048
        for text, token_ids in zip(TEXTS, expected, strict=True):
            one = (await client.post("/tokenize", json={"prompt": text, **options})).json()
            assert one["tokens"] == token_ids and one["count"] == len(token_ids)
            assert one["token_strs"] == REFERENCE.convert_ids_to_tokens(token_ids)
            reply = await gateway.stub.Tokenize(gateway_pb2.TokenizeRequest(text=text, add_special_tokens=adds))
            assert list(reply.token_ids) == token_ids and list(reply.tokens) == one["token_strs"]
        back = (await client.post("/detokenize", json={"tokens": expected, "skip_special_tokens": False})).json()
        assert back["prompt"] == [REFERENCE.decode(each) for each in expected]
        back = (await client.post("/detokenize", json={"tokens": expected[2]})).json()
        assert back["prompt"] == REFERENCE.decode(expected[2])

    with_client(tmp_path, test)


@pytest.mark.parametrize("runner", ["generate", "pooling"])
@pytest.mark.parametrize("adds", [None, True, False])
def test_inputs_are_placed_as_by_the_servers_of_hugging_face(tmp_path: Path, adds: bool | None, runner: str) -> None:
    texts = [*TEXTS, "", "🤗 Łódź"]

    def expected(text: str) -> list[dict[str, Any]]:
        adds_them = adds is not False
        found = REFERENCE(
            text, add_special_tokens=adds_them, return_offsets_mapping=True, return_special_tokens_mask=True
        )
        columns = found["input_ids"], found["offset_mapping"], found["special_tokens_mask"]
        return [
            {
                "id": token_id,
                "text": REFERENCE.convert_ids_to_tokens(token_id) if special else text[start:stop],
                "special": bool(special),
                "start": None if special else start,
                "stop": None if special else stop,
            }
            for token_id, (start, stop), special in zip(*columns, strict=True)
        ]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        several = await client.post("/tokenize", json={"inputs": texts, "add_special_tokens": adds})
        assert several.json() == [expected(text) for text in texts]
        one = (await client.post("/tokenize", json={"inputs": texts[0], "add_special_tokens": adds})).json()
        assert one == ([expected(texts[0])] if runner == "pooling" else expected(texts[0]))
        both = await client.post("/tokenize", json={"inputs": texts, "prompt": "a"})
        assert both.status_code == 400 and "exactly one" in both.text
        many = await client.post("/tokenize", json={"inputs": ["a"] * 6})
        assert many.status_code == 400 and many.json()["error"]["param"] == "inputs"

    with_client(tmp_path, test, runner=runner, max_prompts=5)


def test_the_tokens_of_many_texts_are_held(tmp_path: Path) -> None:
    """Their strings, too, so that few bytes of texts cannot become many of tokens in several requests at once."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body: dict[str, Any] = {"prompt": ["!?" * 1000] * 20}
        answer = await client.post("/tokenize", json=body)
        assert answer.status_code == 200 and sum(answer.json()["count"]) > 20_000
        for larger in (body | {"return_token_strs": True}, {"inputs": body["prompt"]}):
            refused = await client.post("/tokenize", json=larger)
            assert refused.status_code == 400 and "gateway.max_held_bytes" in refused.json()["error"]["message"]
        assert (await client.post("/tokenize", json=body)).status_code == 200

    with_client(tmp_path, test, max_held_bytes=4_000_000)


LONGEST = max(range(len(REFERENCE)), key=lambda token_id: len(REFERENCE.decode([5, token_id])))


@pytest.mark.parametrize("model", [None, ""])
def test_long_texts_of_tokens_are_written_whole(tmp_path: Path, model: str | None) -> None:
    """Also where they are written in pieces, and have what JSON escapes."""
    lists = [REFERENCE.encode('"\\ \n日本" ' * 60) * 4, [], [LONGEST] * 2000, [5]]
    expected: Any = [REFERENCE.decode(each) for each in lists]
    names = {"prompt", "text"} if model is not None else {"prompt", "text", "content"}

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for tokens, texts in ((lists, expected), (lists[2], expected[2])):
            response = await client.post("/detokenize", json={"tokens": tokens, "model": model})
            assert response.headers["content-type"] == "application/json"
            assert response.json() == dict.fromkeys(names, texts)

    assert sum(map(len, expected)) > 2**14
    with_client(tmp_path, test)


def test_the_texts_of_many_tokens_are_held(tmp_path: Path) -> None:
    """A few bytes of ids stand for long tokens, of which several requests at once may have many."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"tokens": [[LONGEST] * 2000] * 20}
        refused = await client.post("/detokenize", json=body)
        assert refused.status_code == 400 and "gateway.max_held_bytes" in refused.json()["error"]["message"]
        assert (await client.post("/detokenize", json={"tokens": [[LONGEST] * 2000] * 4})).status_code == 200
        message = gateway_pb2.DetokenizeRequest(token_ids=[LONGEST] * 2000)
        assert len((await gateway.stub.Detokenize(message)).text) > 10_000

    with_client(tmp_path, test, max_held_bytes=2_000_000)


def test_texts_that_nobody_reads_need_no_more_memory(tmp_path: Path) -> None:
    """So no other request waits until they have got more."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        reader, writer = await connect(gateway.http_address)
        tokens = [[LONGEST] * 2000] * 20
        writer.write(request_bytes("/detokenize", {"tokens": tokens}))
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        response = await client.post("/detokenize", json={"tokens": tokens[:1]})
        assert response.status_code == 200, response.text
        writer.transport.abort()

    with_client(tmp_path, test, max_held_bytes=6_000_000, max_held_wait_s=0.5)


def test_a_chat_with_content_parts_is_tokenized(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for begins, adds in itertools.product((None, True, False), repeat=2):
            body = {"messages": CHAT, "add_generation_prompt": begins, "add_special_tokens": adds}
            text = REFERENCE.apply_chat_template(PLAIN_CHAT, add_generation_prompt=begins is not False, tokenize=False)
            expected = REFERENCE.encode(text, add_special_tokens=bool(adds))
            assert (await client.post("/tokenize", json=body)).json()["tokens"] == expected, (begins, adds)

    with_client(tmp_path, test)


def test_a_chat_is_tokenized_without_tools_that_the_model_may_not_call(tmp_path: Path) -> None:
    """As the prompt of the same chat has them."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        found = {}
        for choice in ("none", "auto", None):
            body = {"messages": USER, "tools": tools, "tool_choice": choice}
            tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
            assert (await client.post(CHATS, json=body | {"max_tokens": 1})).status_code == 200
            assert tokens == list(dense.submits[-1].spec.prompt_token_ids)
            found[choice] = tokens
        bare = (await client.post("/tokenize", json={"messages": USER, "tool_choice": "auto"})).json()["tokens"]
        assert found["none"] == bare != found["auto"] == found[None]

    dense = FakeDense(say(" one"))
    http_gateway.with_client(tmp_path, dense, test)


def test_wrong_lists_are_a_400(tmp_path: Path) -> None:
    wrong: list[tuple[str, dict[str, Any], str, str]] = [
        ("/tokenize", {"prompt": []}, "prompt", "0 elements, must have 1 to 3"),
        ("/tokenize", {"prompt": ["a"] * 4}, "prompt", "4 elements, must have 1 to 3"),
        ("/tokenize", {"prompt": ["a"] * 1025}, "prompt", "1025 elements, at most 1024"),
        ("/tokenize", {"prompt": ["a", 5]}, "prompt[1]", "5"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens", "'no'"),
        ("/detokenize", {"tokens": [[5]] * 4}, "tokens", "4 elements, must have 1 to 3"),
        ("/detokenize", {"tokens": [[5], [10**6]]}, "tokens", "1000000"),
        ("/detokenize", {"tokens": [[5], 5]}, "tokens[1]", "5"),
    ]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, body, param, words in wrong:
            response = await client.post(path, json=body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == param and words in error["message"], error

    with_client(tmp_path, test, max_prompts=3)


def test_tokenizer_info_suffices_to_build_the_same_tokenizer(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        info = (await client.get("/tokenizer_info")).json()
        assert str(EMBEDDED_MODEL.parent) not in json.dumps(info), "no paths of this machine"
        assert info["tokenizer_class"] == type(REFERENCE).__name__
        assert {name: info[name] for name in REFERENCE.special_tokens_map} == REFERENCE.special_tokens_map
        assert info["model_max_length"] == REFERENCE.model_max_length
        elsewhere = PreTrainedTokenizerFast(tokenizer_object=REFERENCE.backend_tokenizer)
        elsewhere.chat_template, elsewhere.eos_token = info["chat_template"], info["eos_token"]
        elsewhere.bos_token = info["bos_token"]
        body = {"messages": PLAIN_CHAT}
        tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
        assert elsewhere.apply_chat_template(PLAIN_CHAT, add_generation_prompt=True, return_dict=False) == tokens
        for token_id, token in REFERENCE.added_tokens_decoder.items():
            shown = info["added_tokens_decoder"][str(token_id)]
            assert (shown["content"], shown["special"]) == (token.content, token.special)

    with_client(tmp_path, test, tokenizer_info=True)


def test_tokenizer_info_is_served_only_if_configured(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.get("/tokenizer_info")
        assert response.status_code == 404 and "gateway.tokenizer_info" in response.json()["error"]["message"]

    with_client(tmp_path, test)


@pytest.mark.parametrize("body", [{"prompt": ""}, {"content": ""}, {"content": "", "add_special": True}])
def test_an_empty_text_has_the_tokens_that_transformers_gives_it(tmp_path: Path, body: dict[str, Any]) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post("/tokenize", json=body)
        expected = REFERENCE.encode("", add_special_tokens="prompt" in body or "add_special" in body)
        assert response.status_code == 200, response.text
        assert (response.json()["tokens"], response.json()["count"]) == (expected, len(expected))
        several = (await client.post("/tokenize", json={"prompt": ["", "a"]})).json()
        assert several["tokens"] == [REFERENCE.encode(""), REFERENCE.encode("a")]

    with_client(tmp_path, test)


def test_detokenize_answers_as_the_server_whose_form_the_request_has(tmp_path: Path) -> None:
    token_ids = REFERENCE.encode("San Francisco")

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        text = REFERENCE.decode(token_ids)
        of_vllm = {"model": EMBEDDED_MODEL.name, "tokens": token_ids}
        assert (await client.post("/detokenize", json=of_vllm)).json() == {"prompt": text, "text": text}
        assert (await client.post("/v1/detokenize", json=of_vllm)).json()["text"] == text
        assert (await client.post("/detokenize", json={"tokens": token_ids})).json()["content"] == text

    with_client(tmp_path, test)
