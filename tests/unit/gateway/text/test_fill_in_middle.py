"""`suffix`: prompts of models that fill in the middle, compared with the formats that their authors publish."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from transformers import AddedToken, AutoTokenizer, CodeLlamaTokenizer, PreTrainedTokenizerFast

from services.common.config import EMBEDDED_MODEL
from services.common.errors import InvalidRequest
from services.gateway.text.fill_in_middle import FillInMiddle
from tests.support.clients.http_clients import async_client
from tests.support.running_gateway import RunningGateway, run, running_gateway
from tests.support.workers.fake_dense import FakeDense
from tests.unit.gateway.apis.openai.test_chat_templates import make_model

PREFIX, SUFFIX = "def add(a, b):\n    ", "\n    return total\n"
# From the model cards of Qwen2.5-Coder, StarCoder and DeepSeek-Coder: the whole prompt as one text, which the
# tokenizer turns into tokens.
PUBLISHED = {
    "qwen": "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    "starcoder": "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    "deepseek": "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
}
TOKENS = {
    "qwen": ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
    "starcoder": ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"],
    "deepseek": ["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"],
}


def coder(family: str) -> PreTrainedTokenizerFast:
    """The embedded model's tokenizer with the tokens of a family."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in TOKENS[family]])
    return tokenizer


def make_coder(path: Path, family: str) -> Path:
    """A model directory with that tokenizer."""
    model = make_model(path)
    coder(family).save_pretrained(model)
    return model


@pytest.mark.parametrize("family", PUBLISHED)
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("suffix", [SUFFIX, " tail", "tail"])
@pytest.mark.parametrize("prefix", [PREFIX, "", " head"])
def test_the_prompt_has_the_published_format(family: str, adds: bool, prefix: str, suffix: str) -> None:
    tokenizer = coder(family)
    text = PUBLISHED[family].format(prefix=prefix, suffix=suffix)
    expected = tokenizer.encode(text, add_special_tokens=adds)
    fill_in_middle = FillInMiddle(tokenizer)
    fill_in_middle.check()
    assert fill_in_middle.encode(prefix, suffix, "", adds) == expected
    assert fill_in_middle.encode(prefix, suffix, " tot", adds) == tokenizer.encode(
        text + " tot", add_special_tokens=adds
    )
    token_ids = tokenizer.encode(prefix, add_special_tokens=False)
    assert fill_in_middle.encode(token_ids, suffix, "", adds) == expected


def test_the_suffix_of_code_llama_gets_no_space_in_front() -> None:
    """The format of Meta's `infilling_prompt_tokens`: the prefix is a text like any other, the suffix is not."""
    words = ["<unk>", "<s>", "</s>", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>", "▁", "a", "b", "☺", "▁a", "▁b"]
    ids = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = CodeLlamaTokenizer(vocab=ids, merges=[("▁", "a"), ("▁", "b")])
    fill_in_middle = FillInMiddle(tokenizer)
    for suffix, expected in (("b", ["b"]), (" b", ["▁b"]), ("b a", ["b", "▁a"])):
        token_ids = fill_in_middle.encode("a b", suffix, "", True)
        assert [words[token_id] for token_id in token_ids] == [
            "<s>", "▁<PRE>", "▁a", "▁b", "▁<SUF>", *expected, "▁<MID>",
        ]  # fmt: skip
    assert fill_in_middle.end_token_ids == (ids["▁<EOT>"],)


def test_a_model_without_the_tokens_refuses_a_suffix() -> None:
    fill_in_middle = FillInMiddle(AutoTokenizer.from_pretrained(EMBEDDED_MODEL))
    with pytest.raises(InvalidRequest, match=r"tokenizer has none of the tokens .*<fim_prefix>"):
        fill_in_middle.check()


def with_coder(tmp_path: Path, dense: FakeDense, test: Any) -> None:
    async def body() -> None:
        model = await asyncio.to_thread(make_coder, tmp_path / "model", "qwen")
        async with (
            running_gateway(tmp_path, dense, model=model) as gateway,
            async_client(gateway.http_address) as client,
        ):
            await test(client, gateway)

    run(body())


def test_completions_stand_between_prompt_and_suffix(tmp_path: Path) -> None:
    tokenizer = coder("qwen")
    pad = tokenizer.convert_tokens_to_ids("<|fim_pad|>")
    answer = tokenizer.encode("total = a + b", add_special_tokens=False)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        api = openai.AsyncOpenAI(api_key="none", base_url="http://gateway/v1", http_client=client, max_retries=0)
        options: Any = {"model": "model", "max_tokens": 50}
        [choice] = (await api.completions.create(prompt=PREFIX, suffix=SUFFIX, **options)).choices
        assert (choice.finish_reason, choice.text) == ("stop", tokenizer.decode(answer))
        assert (await api.completions.create(prompt="a", suffix="", **options)).usage.prompt_tokens == 2
        body = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 50}
        filled = (await client.post("/infill", json={**body, "prompt": " tot"})).json()
        assert (filled["content"], filled["stop_type"]) == (choice.text, "eos")
        for fields, param in (
            ({"echo": True}, "echo"),
            ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await api.completions.create(prompt=PREFIX, suffix=SUFFIX, extra_body=fields, **options)
            assert refused.value.param == param
        extra = [{"filename": "a.py", "text": "b = 1\n"}, {"text": "c"}]
        assert (await client.post("/infill", json={**body, "input_extra": extra})).status_code == 200
        long = [{"filename": "a.py", "text": "b = 1\n" * 4000}]
        assert (await client.post("/infill", json={**body, "input_extra": long})).status_code == 200

    dense = FakeDense(lambda submit: [*answer, pad, tokenizer.eos_token_id])
    with_coder(tmp_path, dense, test)
    text = PUBLISHED["qwen"].format(prefix=PREFIX, suffix=SUFFIX)
    prompts = [list(submit.spec.prompt_token_ids) for submit in dense.submits]
    *prompts, with_extra, cut = prompts
    assert prompts == [tokenizer.encode(text), tokenizer.encode("a"), tokenizer.encode(text + " tot")]
    files = "<|file_sep|>a.py\nb = 1\n<|file_sep|>tmp\nc<|file_sep|>filename\n"
    assert with_extra == tokenizer.encode(f"<|repo_name|>myproject\n{files}{text}")
    bos, *gap = prompts[0]
    assert (cut[0], cut[-len(gap) :], len(cut)) == (bos, gap, 2048 - 50)


@pytest.mark.parametrize("extra", [[{"filename": "a" * 20_000, "text": ""}], [{"text": ""}] * 256])
def test_long_names_and_many_excerpts_are_encoded_in_a_thread(
    extra: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def encode(*arguments: Any) -> list[int]:
        threads.append(threading.current_thread())
        return [5]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        monkeypatch.setattr(FillInMiddle, "encode", encode)
        for extras, is_inline in (extra, False), ([{"text": "a"}], True):
            body = {"input_prefix": "a", "input_suffix": "b", "n_predict": 1, "input_extra": extras}
            assert (await client.post("/infill", json=body)).status_code == 200
            assert (threads.pop() is threading.current_thread()) is is_inline
        for wrong in ({}, {"filename": "ok"}, {"filename": 1, "text": "a"}, {"text": 1}):
            refused = await client.post("/infill", json=body | {"input_extra": [wrong]})
            assert refused.status_code == 400 and "input_extra[0]" in refused.json()["error"]["message"]

    with_coder(tmp_path, FakeDense(lambda submit: [5]), test)


def test_without_tokens_for_files_excerpts_are_snippets() -> None:
    tokenizer = coder("deepseek")
    gap = PUBLISHED["deepseek"].format(prefix=PREFIX, suffix=SUFFIX)
    excerpts, room = [("a.py", "b = 1"), ("c.py", "d")], [100, 3, -1]
    encoded = [FillInMiddle(tokenizer).encode(PREFIX, SUFFIX, "", False, excerpts, lambda _, n=n: n) for n in room]
    first, few, none = encoded
    assert tokenizer.decode(first) == f"\n\n--- snippet ---\n\nb = 1\n\n--- snippet ---\n\nd{gap}"
    assert few == first[-len(few) :] and len(few) == len(none) + 3
    assert none == tokenizer.encode(gap, add_special_tokens=False)
