"""Token counts, finish reason, token ids and prompt in the chunks of a streamed answer, and in whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from tests.support.clients.http_clients import async_client, events
from tests.support.running_gateway import run, running_gateway
from tests.support.workers.fake_dense import FakeDense, fake_logprob

REFERENCE = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
EOS = REFERENCE.eos_token_id
USER = [{"role": "user", "content": "Hi"}]
INPUTS = {"/v1/completions": {"prompt": "Tell me"}, "/v1/chat/completions": {"messages": USER}}
PATHS = list(INPUTS)
TEXT = " Łódź, 東京 🙂🙃 cities."
MATCHED = {"length": None, "stop string": " three", "EOS": EOS}  # as SGLang names it


def ids(text: str) -> list[int]:
    return REFERENCE(text, add_special_tokens=False)["input_ids"]


def prompt_ids(path: str) -> list[int]:
    if path == "/v1/completions":
        return REFERENCE("Tell me")["input_ids"]
    return ids(REFERENCE.apply_chat_template(USER, add_generation_prompt=True, tokenize=False))


def post(
    tmp_path: Path,
    path: str,
    token_ids: Sequence[int],
    *,
    vocab_size: int = 32_000,
    max_logprobs: int = 20,
    step_s: float = 0.002,
    **body: Any,
) -> list[Any]:
    """Sends a request whose sequences all get `token_ids`. Returns the events of a stream, or else one object."""
    objects: list[Any] = []

    async def test() -> None:
        dense = FakeDense(lambda submit: token_ids, step_s=step_s, vocab_size=vocab_size)
        gateway_of_test = running_gateway(tmp_path, dense, max_logprobs=max_logprobs)
        async with gateway_of_test as gateway, async_client(gateway.http_address) as client:
            response = await client.post(path, json={**INPUTS[path], "max_tokens": len(token_ids), **body})
            assert response.status_code == 200, response.text
            objects.extend(events(response.text) if body.get("stream") else [response.json()])

    run(test())
    return objects


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


@pytest.mark.parametrize("path", PATHS)
def test_continuous_usage_counts_the_tokens_of_each_answer(path: str, tmp_path: Path) -> None:
    token_ids, num_prompt_tokens = ids(TEXT), len(prompt_ids(path))
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = post(
        tmp_path, path, token_ids, n=2, stream=True, stream_options=options, return_token_ids=True
    )
    num_tokens = {0: 0, 1: 0}
    for chunk in chunks:
        [choice] = chunk["choices"]
        num_tokens[choice["index"]] += len(choice.get("token_ids", ()))
        assert chunk["usage"] == {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens[choice["index"]],
            "total_tokens": num_prompt_tokens + num_tokens[choice["index"]],
        }
    assert list(num_tokens.values()) == [len(token_ids)] * 2
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 * len(token_ids)
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_tokens_whose_text_is_held_back_are_counted(tmp_path: Path) -> None:
    token_ids = ids("🙂🙃")
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = post(tmp_path, "/v1/completions", token_ids, stream=True, stream_options=options, echo=True)
    texts = [text_of(chunk["choices"][0]) for chunk in chunks]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(texts) and "" in texts, "some tokens complete no character"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(set(counts))
    assert counts[-1] == len(token_ids) == last["usage"]["completion_tokens"]
    assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == "Tell me🙂🙃"


def test_continuous_usage_needs_include_usage(tmp_path: Path) -> None:
    options = {"continuous_usage_stats": True}
    chunks = post(tmp_path, "/v1/completions", ids(TEXT), stream=True, stream_options=options)
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("end", ["length", "stop string", "EOS"])
def test_the_chunk_of_the_last_token_has_the_finish_reason(end: str, tmp_path: Path) -> None:
    token_ids = ids(" one two three") + [EOS] * (end == "EOS")
    body: dict[str, Any] = {"stop": " three"} if end == "stop string" else {}
    chunks = post(tmp_path, "/v1/completions", token_ids, stream=True, return_token_ids=True, **body)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0].get("token_ids")]
    assert chunks[-1]["choices"][0] is choices[-1], "a chunk follows that of the last token"
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == ("length" if end == "length" else "stop")
    assert choices[-1]["stop_reason"] == (" three" if end == "stop string" else None)
    assert choices[-1]["matched_stop"] == MATCHED[end]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == token_ids
    assert "".join(map(text_of, choices)) == (" one two" if end == "stop string" else " one two three")


@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize("end", ["length", "stop string", "EOS"])
def test_the_finish_reason_of_a_chat_stands_beside_a_delta_without_content(
    end: str, has_ids: bool, tmp_path: Path
) -> None:
    token_ids = ids(" one two three") + [EOS] * (end == "EOS")
    body: dict[str, Any] = {"stop": " three"} if end == "stop string" else {}
    chunks = post(tmp_path, "/v1/chat/completions", token_ids, stream=True, return_token_ids=has_ids, **body)
    *choices, last = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices] == [None] * len(choices)
    assert last["finish_reason"] == ("length" if end == "length" else "stop")
    assert last["stop_reason"] == (" three" if end == "stop string" else None)
    assert last["matched_stop"] == MATCHED[end]
    assert "content" not in last["delta"]
    assert "".join(map(text_of, choices)) == (" one two" if end == "stop string" else " one two three")
    if has_ids:
        assert [token_id for each in (*choices, last) for token_id in each.get("token_ids", ())] == token_ids


@pytest.mark.parametrize("path", PATHS)
def test_return_token_ids_includes_those_of_the_prompt_once(path: str, tmp_path: Path) -> None:
    token_ids, expected = ids(" one two"), prompt_ids(path)
    is_chat = path == "/v1/chat/completions"
    [whole] = post(tmp_path, path, token_ids, n=2, return_token_ids=True)
    holders = [whole] if is_chat else whole["choices"]
    assert [holder["prompt_token_ids"] for holder in holders] == [expected] * len(holders)
    chunks = post(tmp_path, path, token_ids, n=2, return_token_ids=True, stream=True)
    if is_chat:
        assert chunks[0]["prompt_token_ids"] == expected
        assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    else:
        for index in range(2):
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert mine[0]["prompt_token_ids"] == expected
            assert all("prompt_token_ids" not in choice for choice in mine[1:])
    [whole] = post(tmp_path, path, token_ids, n=2)
    assert all(holder["prompt_token_ids"] is None for holder in ([whole] if is_chat else whole["choices"]))
    assert "prompt_token_ids" not in str(post(tmp_path, path, token_ids, n=2, stream=True))


def test_every_choice_has_the_token_ids_of_its_prompt(tmp_path: Path) -> None:
    prompts = [[70, 71], [80]]
    [whole] = post(tmp_path, "/v1/completions", [5], prompt=prompts, n=2, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [[70, 71]] * 2 + [[80]] * 2


@pytest.mark.parametrize("is_stream", [False, True])
def test_tokens_can_be_named_by_their_ids(is_stream: bool, tmp_path: Path) -> None:
    token_ids = ids(TEXT)
    names = [f"token_id:{token_id}" for token_id in token_ids]
    options = {"return_tokens_as_token_ids": True, "stream": is_stream}
    objects = post(tmp_path, "/v1/completions", token_ids, logprobs=3, **options)
    parts = [each["choices"][0]["logprobs"] for each in objects]
    assert [name for part in parts for name in part["tokens"]] == names
    tops = [top for part in parts for top in part["top_logprobs"]]
    for token_id, top in zip(token_ids, tops, strict=True):
        assert top == {f"token_id:{i}": fake_logprob(i) for i in range(token_id - 2, token_id + 1)}
    objects = post(tmp_path, "/v1/chat/completions", token_ids, logprobs=True, top_logprobs=3, **options)
    parts = [each["choices"][0]["logprobs"] for each in objects]
    entries = [entry for part in parts if part is not None for entry in part["content"]]
    assert [entry["token"] for entry in entries] == names
    assert bytes(value for entry in entries for value in entry["bytes"]).decode() == TEXT
    for token_id, entry in zip(token_ids, entries, strict=True):
        assert [top["token"] for top in entry["top_logprobs"]] == [
            f"token_id:{i}" for i in range(token_id - 2, token_id + 1)
        ]


@pytest.mark.parametrize("is_stream", [False, True])
def test_minus_one_requests_logprobs_of_the_whole_vocabulary(is_stream: bool, tmp_path: Path) -> None:
    size, expected = 1024, {f"token_id:{i}": fake_logprob(i) for i in range(1024)}
    options = {"return_tokens_as_token_ids": True, "stream": is_stream, "vocab_size": size, "max_logprobs": size}
    objects = post(tmp_path, "/v1/completions", [9, 7], logprobs=-1, **options)
    tops = [top for each in objects for top in each["choices"][0]["logprobs"]["top_logprobs"]]
    assert tops == [expected] * 2
    objects = post(tmp_path, "/v1/chat/completions", [9, 7], logprobs=True, top_logprobs=-1, **options)
    parts = [each["choices"][0]["logprobs"] for each in objects]
    entries = [entry for part in parts if part is not None for entry in part["content"]]
    assert [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries] == [expected] * 2


def test_a_streamed_chat_has_the_logprobs_of_its_prompt_once(tmp_path: Path) -> None:
    chunks = post(tmp_path, "/v1/chat/completions", ids(" one two"), n=3, stream=True, prompt_logprobs=1)
    [first, *others] = [chunk for chunk in chunks if "prompt_logprobs" in chunk]
    assert others == []
    [whole] = post(tmp_path, "/v1/chat/completions", ids(" one two"), n=3, prompt_logprobs=1)
    assert first["prompt_logprobs"] == whole["prompt_logprobs"]
    assert len(whole["prompt_logprobs"]) == len(prompt_ids("/v1/chat/completions"))
    assert all(len(chunk["choices"]) == 1 for chunk in chunks), "every chunk belongs to an answer"


@pytest.mark.parametrize(("role", "lead"), [("assistant", "It is a"), ("user", "")])
@pytest.mark.parametrize("is_stream", [False, True])
def test_the_echo_of_a_chat_is_its_last_assistant_message(
    role: str, lead: str, is_stream: bool, tmp_path: Path
) -> None:
    messages = [*USER, {"role": role, "content": [{"type": "text", "text": "It is a"}]}]
    body = {"messages": messages, "n": 2, "echo": True, "stream": is_stream, "logprobs": True}
    objects = post(tmp_path, "/v1/chat/completions", ids(" city"), **body)
    texts = {0: "", 1: ""}
    for choice in (choice for each in objects for choice in each["choices"]):
        texts[choice["index"]] += text_of(choice) if is_stream else choice["message"]["content"]
    assert list(texts.values()) == [f"{lead} city"] * 2


WITHOUT_TEXT = 31_000  # an id beyond the tokenizer
ASKING = [
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"return_token_ids": True},
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("asking", ASKING, ids=["usage", "continuous usage", "token ids"])
def test_who_counts_tokens_gets_those_without_text(path: str, asking: dict[str, Any], tmp_path: Path) -> None:
    assert len(REFERENCE) <= WITHOUT_TEXT
    token_ids = [WITHOUT_TEXT] * 4
    chunks = [each for each in post(tmp_path, path, token_ids, step_s=0.05, stream=True, **asking) if each["choices"]]
    unfinished = [each for each in chunks if each["choices"][0]["finish_reason"] is None]
    opening = 1 if path == "/v1/chat/completions" else 0
    assert len(unfinished) > opening, "the first token is seen when it comes"
    assert {text_of(each["choices"][0]) for each in unfinished} == {""}
    plain = post(tmp_path, path, token_ids, step_s=0.05, stream=True)
    assert [each["choices"][0]["finish_reason"] for each in plain] == [*[None] * opening, "length"]
