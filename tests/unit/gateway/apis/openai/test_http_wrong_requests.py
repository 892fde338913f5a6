"""Wrong requests are refused with an error that names the wrong field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.clients.http_gateway import (
    CHAT,
    CHATS,
    COMPLETIONS,
    PROMPT,
    USER,
    answers_to,
    check_error,
    with_client,
)
from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense

WRONG_BODIES: list[tuple[str, Any, str | None, tuple[str, ...]]] = [
    (COMPLETIONS, {}, "prompt", ("must be provided",)),
    (COMPLETIONS, [], None, ("[]",)),
    (COMPLETIONS, {"prompt": ""}, "prompt", ("empty",)),
    (COMPLETIONS, {"prompt": []}, "prompt", ("prompt or prompt_embeds", "non-empty")),
    (COMPLETIONS, {"prompt": ["a"] * 65}, "prompt", ("65 prompts", "64")),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", ()),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", ()),
    (COMPLETIONS, {"prompt": [1, "b"]}, "prompt[1]", ("'b'",)),
    (COMPLETIONS, {"prompt": ["b", 1]}, "prompt[1]", ("1",)),
    (COMPLETIONS, {"prompt": [True]}, "prompt[0]", ("true",)),
    (COMPLETIONS, {"prompt": [[1], 2]}, "prompt[1]", ("2",)),
    (COMPLETIONS, {"prompt": [10**9]}, "prompt", ("prompt[0] is 1000000000, out of vocabulary", "32000")),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", ("prompt[0] is -1, out of vocabulary", "greater than or equal to 0")),
    (COMPLETIONS, {"prompt": [[32_000], [5]]}, "prompt", ("prompt[0][0] is 32000, out of vocabulary",)),
    (COMPLETIONS, {"prompt": [[32_000]]}, "prompt", ("prompt[0] is 32000, out of vocabulary",)),
    (COMPLETIONS, {"prompt": [2**63]}, "prompt[0]", (str(2**63),)),
    (COMPLETIONS, {"prompt": [5] * 2048}, "prompt", ("2048",)),
    (COMPLETIONS, {"prompt": "word " * 300_000}, "prompt", ("1500000", "2048")),
    (COMPLETIONS, PROMPT | {"max_tokens": True}, "max_tokens", ("true",)),
    (COMPLETIONS, PROMPT | {"max_tokens": 0}, "max_tokens", ("0", "echo")),
    (COMPLETIONS, PROMPT | {"max_tokens": 0, "echo": True, "n": 2}, "n", ("2", "must be 1")),
    (COMPLETIONS, PROMPT | {"max_tokens": 10**30}, "max_tokens", ()),
    (COMPLETIONS, PROMPT | {"max_tokens": 3000, "min_tokens": 3000}, "min_tokens", ("3000", "2048")),
    (COMPLETIONS, PROMPT | {"max_tokens": "5"}, "max_tokens", ("'5'",)),
    (COMPLETIONS, PROMPT | {"seed": 2**63}, "seed", (str(2**63), str(2**63 - 1))),
    (COMPLETIONS, PROMPT | {"seed": -(2**63) - 1}, "seed", (str(-(2**63) - 1), str(-(2**63)))),
    (COMPLETIONS, PROMPT | {"temperature": -1}, "temperature", ("-1",)),
    (COMPLETIONS, PROMPT | {"temperature": True}, "temperature", ("true",)),
    (COMPLETIONS, PROMPT | {"temperature": 10**400}, "temperature", ()),
    (COMPLETIONS, PROMPT | {"temperature": {"a": [True, None]}}, "temperature", ('{"a": [true, null]}',)),
    (COMPLETIONS, PROMPT | {"top_p": 0}, "top_p", ("0",)),
    (COMPLETIONS, PROMPT | {"top_k": -2}, "top_k", ("-2", "greater than or equal to -1")),
    (COMPLETIONS, PROMPT | {"n": 0}, "n", ("0", "16")),
    (COMPLETIONS, PROMPT | {"n": 17}, "n", ("17", "16")),
    (COMPLETIONS, PROMPT | {"n": 2, "best_of": 1}, "best_of", ("1", "2")),
    (COMPLETIONS, PROMPT | {"best_of": 2, "stream": True}, "best_of", ("streamed",)),
    (COMPLETIONS, PROMPT | {"logprobs": 21}, "logprobs", ("21", "20")),
    (COMPLETIONS, PROMPT | {"logprobs": -1}, "logprobs", ("32000", "the vocabulary", "20", "gateway.max_logprobs")),
    (COMPLETIONS, PROMPT | {"logprobs": -2}, "logprobs", ("-2",)),
    (COMPLETIONS, PROMPT | {"logprobs": 1, "logprob_token_ids": []}, "logprob_token_ids", ("not be an empty list",)),
    (CHATS, CHAT | {"logprob_token_ids": []}, "logprob_token_ids", ("must not be an empty list",)),
    (CHATS, CHAT | {"logprob_token_ids": [5]}, "logprob_token_ids", ("when using `logprob_token_ids`",)),
    (COMPLETIONS, PROMPT | {"prompt_logprobs": 21}, "prompt_logprobs", ("21", "20")),
    (COMPLETIONS, PROMPT | {"logprobs": True}, "logprobs", ("true",)),
    (COMPLETIONS, PROMPT | {"stop": ["a"] * 17}, "stop", ("17", "16")),
    (COMPLETIONS, PROMPT | {"stop": [""]}, "stop", ()),
    (COMPLETIONS, PROMPT | {"stop": 5}, "stop", ("5",)),
    (COMPLETIONS, PROMPT | {"logit_bias": {"x": 1}}, "logit_bias", ("'x'",)),
    (COMPLETIONS, PROMPT | {"logit_bias": {"99999": 1}}, "logit_bias", ("99999",)),
    (COMPLETIONS, PROMPT | {"logit_bias": {"1": 1e300}}, "logit_bias", ()),
    (COMPLETIONS, PROMPT | {"allowed_token_ids": []}, "allowed_token_ids", ("at least 1",)),
    (COMPLETIONS, PROMPT | {"allowed_token_ids": [5] * 1025}, "allowed_token_ids", ("1025", "1024")),
    (COMPLETIONS, PROMPT | {"allowed_token_ids": [5, 32_000]}, "allowed_token_ids", ("32000",)),
    (COMPLETIONS, PROMPT | {"allowed_token_ids": [-1]}, "allowed_token_ids[0]", ("-1",)),
    (COMPLETIONS, PROMPT | {"allowed_token_ids": [99], "stop_token_ids": [99], "min_tokens": 1},
     "allowed_token_ids", ("exclude all", "min_tokens")),
    (COMPLETIONS, PROMPT | {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ("-1 or at least 1",)),
    (COMPLETIONS, PROMPT | {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ("-2",)),
    (COMPLETIONS, PROMPT | {"truncate_prompt_tokens": 2049}, "truncate_prompt_tokens", ("is 2049", "is 2048. Please")),
    (COMPLETIONS, PROMPT | {"truncate_prompt_tokens": -1, "max_tokens": 2048}, "max_tokens", ("2048",)),
    (COMPLETIONS, PROMPT | {"priority": 101}, "priority", ("101", "100")),
    (COMPLETIONS, PROMPT | {"user": "a\nb"}, "user", ()),
    (COMPLETIONS, PROMPT | {"stream_options": {}}, "stream_options", ("stream",)),
    (COMPLETIONS, PROMPT | {"suffix": "x"}, "suffix", ("none of the tokens", "<fim_prefix>")),
    (COMPLETIONS, PROMPT | {"response_format": {"type": "json_schema"}}, "response_format", ("must be provided",)),
    (COMPLETIONS, PROMPT | {"response_format": {"type": "xml"}}, "response_format.type", ("xml",)),
    (COMPLETIONS, PROMPT | {"structured_outputs": {}}, "structured_outputs", ("exactly one", "there are 0")),
    (COMPLETIONS, PROMPT | {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", ("are 2",)),
    (COMPLETIONS, PROMPT | {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
     "structured_outputs.disable_additional_properties", ("not supported",)),
    (COMPLETIONS, PROMPT | {"structured_outputs": {"json": "{", "disable_any_whitespace": True}},
     "structured_outputs", ("not JSON",)),
    (COMPLETIONS, PROMPT | {"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", ("guided_choice",)),
    (CHATS, CHAT | {"response_format": {"type": "json_object"}, "regex": "a"}, "regex", ("response_format",)),
    (COMPLETIONS, PROMPT | {"guided_choice": ["x"] * 10_001}, "guided_choice", ("10001", "10000")),
    (COMPLETIONS, PROMPT | {"guided_choice": []}, "guided_choice", ("guided_choice has 0 choices", "1 to 10000")),
    (COMPLETIONS, PROMPT | {"structured_outputs": {"choice": []}}, "structured_outputs.choice", ("0 choices",)),
    (COMPLETIONS, PROMPT | {"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice",
     ("empty", "index 1")),
    (COMPLETIONS, PROMPT | {"guided_regex": "a" * (256 * 1024 + 1)}, "guided_regex", ("262145", "262144")),
    (COMPLETIONS, PROMPT | {"max_completion_tokens": 5}, "max_completion_tokens", ("not supported",)),
    (COMPLETIONS, PROMPT | {"top_logprobs": 2}, "top_logprobs", ("not supported",)),
    (COMPLETIONS, PROMPT | {"messages": USER}, "messages", ("not supported",)),
    (COMPLETIONS, PROMPT | {"tools": [{}]}, "tools", ("not supported",)),
    (CHATS, CHAT | {"prompt": "x"}, "prompt", ("not supported",)),
    (CHATS, CHAT | {"suffix": "x"}, "suffix", ("not supported",)),
    (CHATS, {}, "messages", ("required",)),
    (CHATS, {"messages": []}, "messages", ("at least 1",)),
    (CHATS, {"messages": "Hi"}, "messages", ("'Hi'",)),
    (CHATS, {"messages": [{"role": "user"}]}, "messages[0].content", ("required",)),
    (CHATS, {"messages": [{"role": "user", "content": None}]}, "messages[0].content", ("required",)),
    (CHATS, {"messages": [*USER, {"role": "system"}]}, "messages[1].content", ("required", "system")),
    (CHATS, {"messages": [*USER, {"role": "assistant", "content": 5}]}, "messages[1].content", ("5",)),
    *(
        (
            CHATS,
            {"messages": [{"role": "user", "content": [part]}]},
            "messages[0].content[0]",
            ("text, image_url or prompt_embeds",),
        )
        for part in ({"type": "film"}, {"type": ["text"]}, {"text": "a"})
    ),
    *(
        (CHATS, {"messages": [*USER, {"role": "user", "content": ["a", {"type": kind, kind: {}}]}]},
         "messages[1].content[1]", (kind, reason))
        for kinds, reason in (
            (("video_url", "input_video", "video"), "no films in chats"),
            (("input_audio", "audio_url"), "no sound in chats, /v1/audio/transcriptions"),
            (("file", "input_file"), "no files in chats"),
            (("image_embeds",), "not as vectors"),
        )
        for kind in kinds
    ),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].image_url",
        (),
    ),
    *(
        (
            CHATS,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": empty, "uuid": "a"}]}]},
            "messages[0].content[0]",
            ("not kept by their uuid", "send the picture again"),
        )
        for empty in (None, {}, "")
    ),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "https://a.b/c"}]}]},
        "messages[0].content[0].image_url",
        ("https://a.b/c",),
    ),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [{"image_url": "https://a.b/c"}]}]},
        "messages",
        ("sees no pictures",),
    ),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a.b/c"}}]}]},
        "messages",
        ("sees no pictures",),
    ),
    (CHATS, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", ("required",)),
    (CHATS, {"messages": [*USER, {"role": "assistant", "tool_calls": [1]}]}, "messages[1].tool_calls[0]", ("1",)),
    (CHATS, {"messages": [{"role": "user", "content": "word " * 300_000}]}, "messages", ("1500000",)),
    (CHATS, CHAT | {"top_logprobs": 2}, "top_logprobs", ("logprobs is true",)),
    (CHATS, CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", ("21", "20")),
    (CHATS, CHAT | {"logprobs": True, "top_logprobs": -1}, "top_logprobs", ("32000", "20")),
    (CHATS, CHAT | {"logprobs": 1}, "logprobs", ()),
    (CHATS, CHAT | {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", ("1", "2")),
    (CHATS, CHAT | {"tools": [{"type": "function"}]}, "tools[0].function", ("missing",)),
    (CHATS, CHAT | {"tool_choice": "auto"}, "tool_choice", ("there are no tools",)),
    (CHATS, CHAT | {"functions": [{}]}, "functions", ("not supported",)),
    (CHATS, CHAT | {"audio": {}}, "audio", ("not supported",)),
    (CHATS, CHAT | {"modalities": ["text", "audio"]}, "modalities", ("not supported",)),
    ("/tokenize", {}, "prompt", ("exactly one",)),
    ("/tokenize", {"inputs": "a", "prompt_name": "b"}, "prompt_name", ("no prompt 'b', it has: none",)),
    ("/tokenize", {"prompt": "a", "prompt_name": "b"}, "prompt_name", ("only with inputs",)),
    ("/generate", {"inputs": "a", "text": "b"}, "inputs", ("cannot be used with text",)),
    ("/tokenize", {"prompt": "a", "messages": USER}, "prompt", ("exactly one",)),
    ("/tokenize", {"prompt": "word " * 300_000}, "prompt", ("1500000",)),
    ("/tokenize", {"messages": [{"role": "user", "content": "word " * 300_000}]}, "messages", ("1500000",)),
    ("/detokenize", {"tokens": [32_000]}, "tokens", ("tokens[0] is 32000, out of vocabulary",)),
    ("/detokenize", {"tokens": [True]}, "tokens[0]", ("true",)),
]  # fmt: skip


def test_wrong_requests_are_refused_and_do_not_disturb_a_stream(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with client.stream("POST", COMPLETIONS, json=body, headers={"x-request-id": "beside"}) as stream:
            for path, wrong, param, words in WRONG_BODIES:
                try:
                    check_error(await client.post(path, json=wrong), 400, param, *words)
                except AssertionError as error:
                    raise AssertionError(f"{path} {json.dumps(wrong)[:200]}") from error
            assert [submit.spec.request_id for submit in dense.submits] == ["beside"]
            assert len(dense.running) == 1
            assert stream.status_code == 200
        await until(lambda: not dense.running)

    dense = FakeDense(lambda submit: [5] * 2000, step_s=0.02)
    with_client(tmp_path, dense, test)


def test_the_error_names_the_wrong_one_of_several_prompts(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post(COMPLETIONS, json={"prompt": [[5], [6, 32_000]]})
        check_error(response, 400, "prompt", "prompt[1][1] is 32000, out of vocabulary")
        await until(lambda: not dense.running)

    dense = FakeDense(lambda submit: [5] * 2000, step_s=0.02)
    with_client(tmp_path, dense, test)


BROKEN_BODIES = {
    "nothing": b"",
    "cut": b'{"prompt": "a"',
    "more after the end": b'{"prompt": "a"}}',
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "a lone low surrogate": b'{"prompt": "a\\udc00b"}',
    "a surrogate in a name": b'{"prompt": "a", "\\ud800": 1}',
    "not UTF-8": b'{"prompt": "\xff"}',
    "UTF-8 of a surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "an endless number": b'{"prompt": "a", "temperature": ' + b"9" * 5000 + b"}",
    "infinity": b'{"prompt": "a", "temperature": 1e999}',
    "depth": b'{"prompt": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "depth in an unknown field": b'{"prompt": "a", "x": ' + b'{"a":' * 30_000 + b"1" + b"}" * 30_000 + b"}",
    "another encoding": '{"prompt": "a"}'.encode("utf-16"),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize", "/detokenize"])
def test_broken_json_is_a_400(path: str, tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for name, data in BROKEN_BODIES.items():
            if name == "infinity" and "token" in path:
                continue  # here this is well-formed JSON with an unknown field
            response = await client.post(path, content=data, headers={"content-type": "application/json"})
            assert response.status_code == 400, name
            assert response.json()["error"]["message"]
        for content_type in ("text/plain", "application/x-www-form-urlencoded"):
            response = await client.post(path, content=b'{"prompt": "a"}', headers={"content-type": content_type})
            check_error(response, 415, None, content_type)
        request = client.build_request("POST", path, content=b'{"prompt": "a"}')
        assert "content-type" not in request.headers
        check_error(await client.send(request), 415, None, "no content-type")

    with_client(tmp_path, FakeDense(lambda submit: [5]), test)


LONG_CHAT = {"messages": [{"role": "user", "content": "word " * 2100}]}
TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "word " * 2100}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 3000}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 2040, "max_tokens": 9}, "max_tokens"),
    (COMPLETIONS, {"prompt": [5] * 2040, "max_tokens": 9, "stream": True}, "max_tokens"),
    (CHATS, LONG_CHAT, "messages"),
    (CHATS, CHAT | {"max_completion_tokens": 2047}, "max_completion_tokens"),
    ("/tokenize", {"prompt": "word " * 300_000}, "prompt"),
]


def test_a_context_overflow_has_the_error_that_clients_recognise(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, body, param in TOO_LONG:
            is_long = not param.startswith("max_")
            response = await client.post(path, json=body)
            check_error(response, 400, param, "This model's maximum context length is 2048 tokens")
            assert response.json()["error"]["code"] == "context_length_exceeded"
            says = response.json()["error"]["message"]
            assert "reduce the length of the input prompt" in says if is_long else f"reduce {param}" in says
            assert ("is longer than the model's context length" in says) == is_long
        assert not dense.submits

    dense = FakeDense(lambda submit: [5])
    with_client(tmp_path, dense, test, strict_max_tokens=True)


LONG_TEXT = "é" * 500_000


LONG_FIELDS: list[dict[str, Any]] = [
    {"model": LONG_TEXT},
    {"user": LONG_TEXT},
    {"cache_salt": LONG_TEXT},
    {"logit_bias": {LONG_TEXT: 1}},
    {"logit_bias": {LONG_TEXT: "x"}},
    {"stream_options": {LONG_TEXT: LONG_TEXT}},
    {"temperature": LONG_TEXT},
    {"temperature": [[[[["x" * 60] * 6] * 6] * 6] * 6] * 6},
]


def test_an_error_repeats_little_of_the_request(tmp_path: Path) -> None:
    bodies = [{**PROMPT, **fields} for fields in LONG_FIELDS]
    for response in answers_to(tmp_path, FakeDense(lambda _: []), COMPLETIONS, bodies):
        assert response.status_code in (400, 404)
        assert len(response.content) < 2000
        assert len(json.dumps(dict(response.headers))) < 1000
