"""SGLang's /generate: the same answers as completions give, in SGLang's objects."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest

from services.gateway.resources.memory_budget import MemoryBudget
from tests.support.clients.gateway_calls import EOS, REFERENCE, ids
from tests.support.clients.http_clients import events
from tests.support.clients.http_gateway import CHATS, COMPLETIONS, answers_to, check_error, say, with_client
from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense

URL = "/generate"
TEXT = " in Łódź, 東京."
PROMPT = "a city"


def test_an_answer_and_what_is_known_about_it(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answer = (await client.post(URL, json={"text": PROMPT, "rid": "mine"})).json()
        assert answer.keys() == {"text", "output_ids", "meta_info"}
        assert (answer["text"], answer["output_ids"]) == (TEXT, [*ids(TEXT), EOS])
        about = answer["meta_info"]
        assert about["id"] == "mine" and about["finish_reason"] == {"type": "stop", "matched": EOS}
        submit = dense.submits[-1]
        assert about["prompt_tokens"] == len(submit.spec.prompt_token_ids)
        assert about["completion_tokens"] == len(ids(TEXT)) + 1
        assert submit.spec.max_tokens == 128 and submit.spec.request_id == "mine"
        by_ids = {"input_ids": list(submit.spec.prompt_token_ids), "sampling_params": {"max_new_tokens": 3}}
        cut = (await client.post(URL, json=by_ids)).json()
        assert cut["output_ids"] == ids(TEXT)[:3]
        assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
        stopped = (await client.post(URL, json={"text": PROMPT, "sampling_params": {"stop": [","]}})).json()
        assert stopped["text"] == " in Łódź"
        assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": ","}

    dense = FakeDense(lambda submit: [*ids(TEXT), EOS][: submit.spec.max_tokens])
    with_client(tmp_path, dense, test)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_begin_within_the_prompt(stream: bool, tmp_path: Path) -> None:
    num_tokens = len(REFERENCE(PROMPT)["input_ids"])
    body = {"text": PROMPT, "return_logprob": True, "stream": stream}

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        wrong = await client.post(URL, json=body | {"logprob_start_len": num_tokens})
        check_error(wrong, 400, "logprob_start_len", f"is {num_tokens}, the prompt has {num_tokens} tokens")
        assert (await client.post(URL, json=body | {"logprob_start_len": num_tokens - 1})).status_code == 200
        unasked = body | {"logprob_start_len": num_tokens, "return_logprob": False}
        assert (await client.post(URL, json=unasked)).status_code == 200

    with_client(tmp_path, FakeDense(lambda submit: [*ids(TEXT), EOS]), test)


@pytest.mark.parametrize("given", ["[,;]", ["never", "[,;]"]], ids=["one", "several"])
def test_a_regular_expression_ends_an_answer_behind_its_match(given: Any, tmp_path: Path) -> None:
    shown = " in Łódź,"
    bodies: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": PROMPT, "stop_regex": given}),
        (CHATS, {"messages": [{"role": "user", "content": PROMPT}], "stop_regex": given}),
        (URL, {"text": PROMPT, "sampling_params": {"stop_regex": given}}),
    ]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for url, body in bodies:
            whole = (await client.post(url, json=body)).json()
            streamed = events((await client.post(url, json=body | {"stream": True})).text)
            if url == URL:
                found = [(each["text"], each["meta_info"]["finish_reason"]) for each in (whole, streamed[-1])]
                assert found == [(shown, {"type": "stop", "matched": "[,;]"})] * 2
                assert whole["output_ids"] == ids(shown)
                continue
            [choice], last = whole["choices"], streamed[-1]["choices"][0]
            assert (choice["message"]["content"] if url == CHATS else choice["text"]) == shown
            assert {each["finish_reason"] for each in (choice, last)} == {"stop"}
            assert {each["matched_stop"] for each in (choice, last)} == {"[,;]"}
            pieces = [each["choices"][0] for each in streamed]
            texts = [(each["delta"].get("content") or "") if url == CHATS else each["text"] for each in pieces]
            assert "".join(texts) == shown
        neutral = await client.post(COMPLETIONS, json={"prompt": PROMPT, "stop_regex": ""})
        assert neutral.json()["choices"][0]["text"] == TEXT

    dense = FakeDense(lambda submit: [*ids(TEXT), EOS][: submit.spec.max_tokens])
    with_client(tmp_path, dense, test)


def test_options_are_those_of_completions(tmp_path: Path) -> None:
    same = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": 0.25,
        "repetition_penalty": 1.5, "stop_token_ids": [99], "ignore_eos": True, "skip_special_tokens": False, "n": 1,
        "stop": "x",
    }  # fmt: skip
    own = {"max_new_tokens": 5, "min_new_tokens": 2, "no_stop_trim": True, "sampling_seed": 3}
    of_completions = {"max_tokens": 5, "min_tokens": 2, "include_stop_str_in_output": True, "seed": 3}

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for url, body in (
            (COMPLETIONS, {"prompt": PROMPT, **same, **of_completions}),
            (URL, {"text": PROMPT, "sampling_params": same | own}),
        ):
            response = await client.post(url, json=body)
            assert response.status_code == 200, response.text
        first, second = dense.submits
        for each in (first, second):
            for name in ("seq_id", "queue_timeout_ms"):
                each.ClearField(name)
            each.spec.ClearField("request_id")
        assert first == second

    dense = FakeDense(lambda submit: ids(" a") * submit.spec.max_tokens)
    with_client(tmp_path, dense, test)


def test_several_prompts_and_answers_come_as_a_list(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for body, count in (
            ({"text": ["a", "b"]}, 2),
            ({"text": ["a"]}, 1),
            ({"input_ids": [[5], [6, 7]], "sampling_params": {"n": 2}}, 4),
            ({"text": "a", "sampling_params": {"n": 2}}, 2),
        ):
            answers = (await client.post(URL, json=body)).json()
            assert [each["text"] for each in answers] == [TEXT] * count
            assert len({each["meta_info"]["id"] for each in answers}) == count
            streamed = events((await client.post(URL, json=body | {"stream": True})).text)
            assert {each["index"] for each in streamed} == set(range(count))

    with_client(tmp_path, FakeDense(lambda submit: [*ids(TEXT), EOS]), test)


def test_each_event_has_the_whole_text_so_far(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post(URL, json={"text": PROMPT, "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.text.endswith("data: [DONE]\n\n")
        found = events(response.text)
        texts = [each["text"] for each in found]
        assert texts[-1] == TEXT and len(texts) > 1
        assert all(after.startswith(before) for before, after in pairwise(texts))
        assert [each["meta_info"]["finish_reason"] for each in found[:-1]] == [None] * (len(found) - 1)
        assert found[-1]["meta_info"]["finish_reason"]["type"] == "stop"
        assert found[-1]["output_ids"] == [*ids(TEXT), EOS]

    with_client(tmp_path, FakeDense(lambda submit: [*ids(TEXT), EOS], step_s=0.005), test)


def test_long_streams_do_not_grow_with_the_square_of_their_length(tmp_path: Path) -> None:
    word = ids(" San Francisco")
    num_words = 1300  # so many that a piece for each word would be less than the least

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": len(word) * num_words}}
        found = events((await client.post(URL, json=body)).text)
        text = found[-1]["text"]
        lengths = [len(each["text"]) for each in found]
        for before, after in pairwise(lengths[:-1]):
            assert after - before > after // 1024
        assert len(text) == len(" San Francisco") * num_words > 1024 * len(" San Francisco")

    dense = FakeDense(lambda submit: word * num_words, max_model_len=100_000)
    with_client(tmp_path, dense, test)


def test_tokens_without_text_are_sent_when_they_come(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 4}}
        found = events((await client.post(URL, json=body)).text)
        assert len(found) > 1 and found[-1]["output_ids"] == [31_000] * 4
        assert {each["text"] for each in found} == {""}
        counts = [each["meta_info"]["completion_tokens"] for each in found]
        assert counts == sorted(set(counts)) and counts == [len(each["output_ids"]) for each in found]

    with_client(tmp_path, FakeDense(lambda submit: [31_000] * 4, step_s=0.05, vocab_size=32_000), test)


def test_log_probabilities_are_those_of_completions(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        options: dict[str, Any] = {"top_logprobs_num": 2, "logprob_start_len": 1, "return_text_in_logprobs": True}
        options |= {"return_logprob": True, "sampling_params": {"max_new_tokens": len(ids(" one two"))}}
        about = (await client.post(URL, json={"input_ids": [5, 6, 7], **options})).json()["meta_info"]
        body = {"prompt": [5, 6, 7], "logprobs": 2, "prompt_logprobs": 2, "max_tokens": len(ids(" one two"))}
        [choice] = (await client.post(COMPLETIONS, json=body)).json()["choices"]
        logprobs, token_ids, texts = zip(*about["output_token_logprobs"], strict=True)
        assert list(logprobs) == choice["logprobs"]["token_logprobs"]
        assert (list(token_ids), "".join(texts)) == (ids(" one two"), " one two")
        assert [len(each) for each in about["output_top_logprobs"]] == [2] * len(token_ids)
        assert [each[1] for each in about["input_token_logprobs"]] == [6, 7]
        prompt = choice["prompt_logprobs"][1:]
        for (logprob, token_id, _), entry in zip(about["input_token_logprobs"], prompt, strict=True):
            assert entry[str(token_id)]["logprob"] == logprob
        del options["logprob_start_len"], options["return_text_in_logprobs"]
        plain = (await client.post(URL, json={"text": PROMPT, **options})).json()["meta_info"]
        assert plain["input_token_logprobs"] == [] and plain["output_token_logprobs"][0][2] is None

    with_client(tmp_path, FakeDense(say(" one two")), test)


def test_options_of_log_probabilities_may_be_lists_for_the_prompts(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        sampling = {"sampling_params": {"max_new_tokens": len(ids(" one two"))}}

        async def answers(**options: Any) -> list[dict[str, Any]]:
            answer = await client.post(URL, json={"input_ids": [[5, 6], [7, 8]], **sampling, **options})
            assert answer.status_code == 200, answer.text
            found = [each["meta_info"] for each in answer.json()]
            return [{key: value for key, value in each.items() if "logprobs" in key} for each in found]

        expected = await answers(return_logprob=True, top_logprobs_num=2, logprob_start_len=0)
        found = await answers(return_logprob=[True, True], top_logprobs_num=[2, 2], logprob_start_len=[0, 0])
        assert found == expected and all(len(each["input_top_logprobs"]) == 2 for each in found)
        mixed = await answers(return_logprob=[True, False], top_logprobs_num=[2, 0], logprob_start_len=[0, -1])
        assert mixed == [expected[0], {}]
        swapped = await answers(return_logprob=[None, True], top_logprobs_num=[0, 2], logprob_start_len=[-1, 0])
        assert swapped == [{}, expected[1]]
        for field, value, count in (("top_logprobs_num", [1, 1, 1], 3), ("return_logprob", [], 0)):
            error = (await client.post(URL, json={"text": ["a", "b"], field: value, **sampling})).json()["error"]
            assert error["param"] == field and f"has {count} elements for 2 prompts" in error["message"]
        single = await client.post(URL, json={"input_ids": [5, 6], "top_logprobs_num": [1, 1]})
        assert single.status_code == 400 and single.json()["error"]["param"] == "top_logprobs_num"

    with_client(tmp_path, FakeDense(say(" one two")), test)


def test_a_stream_of_prompts_has_the_log_probabilities_of_those_that_ask(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body: dict[str, Any] = {"text": ["a", "b"], "return_logprob": [False, True], "stream": True}
        found = events((await client.post(URL, json=body | {"sampling_params": {"max_new_tokens": 3}})).text)
        last = {each["index"]: each["meta_info"] for each in found}
        assert "output_token_logprobs" not in last[0] and len(last[1]["output_token_logprobs"]) == 3

    with_client(tmp_path, FakeDense(lambda submit: ids(" a") * 3), test)


def test_salts_and_keys_may_be_lists_for_the_prompts(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        sampling = {"sampling_params": {"max_new_tokens": 1}}
        for salt, key in (("a", None), ("a", "k"), (None, None)):
            body = {"text": PROMPT, "cache_salt": salt, "extra_key": key, **sampling}
            assert (await client.post(URL, json=body)).status_code == 200
        lists = {"cache_salt": ["a", "a", None], "extra_key": [None, "k", ""]}
        assert (await client.post(URL, json={"text": [PROMPT] * 3, **lists, **sampling})).status_code == 200
        salts = [submit.spec.cache_salt for submit in dense.submits]
        assert salts[3:] == salts[:3] and len(set(salts)) == 3

    dense = FakeDense(lambda submit: ids("a"))
    with_client(tmp_path, dense, test)


def test_an_empty_name_is_none(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        names = []
        for text, name in ((PROMPT, ""), (PROMPT, ""), (["a", "b"], ["", "mine"])):
            body = {"text": text, "rid": name}
            answer = (await client.post(URL, json=body)).json()
            names += [each["meta_info"]["id"] for each in (answer if isinstance(answer, list) else [answer])]
        assert all(names) and len(set(names)) == 4 and names[3] == "mine"

    with_client(tmp_path, FakeDense(lambda submit: [*ids(TEXT), EOS]), test)


def test_a_higher_number_is_served_earlier(tmp_path: Path) -> None:
    """As with SGLang: elsewhere it is the lower one, as with vLLM."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for body in ({"priority": 7}, {"sampling_params": {"priority": 7}}):
            assert (await client.post(URL, json={"text": PROMPT, **body})).status_code == 200
        assert (await client.post(COMPLETIONS, json={"prompt": PROMPT, "priority": -7})).status_code == 200
        assert [submit.spec.priority for submit in dense.submits] == [-7] * 3
        too_high = await client.post(URL, json={"text": PROMPT, "priority": 101})
        check_error(too_high, 400, "priority", "less than or equal to 100")

    dense = FakeDense(lambda submit: [*ids(TEXT), EOS])
    with_client(tmp_path, dense, test)


def test_a_stream_has_the_log_probabilities_so_far(tmp_path: Path) -> None:
    """In so few events that all of them take about nine times what the last one takes."""
    count = 200

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body: dict[str, Any] = {"text": "a", "return_logprob": True, "top_logprobs_num": 2}
        body["sampling_params"] = {"max_new_tokens": count}
        whole = (await client.post(URL, json=body)).json()["meta_info"]
        found = [each["meta_info"] for each in events((await client.post(URL, json=body | {"stream": True})).text)]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert found[-1][name] == whole[name] and len(whole[name]) == count
            for each in found:
                assert each[name] == whole[name][: each["completion_tokens"]]
        assert len(found) > 8 and sum(each["completion_tokens"] for each in found) < 10 * count

    with_client(tmp_path, FakeDense(lambda submit: ids(" a") * count, step_s=0.001), test)


@pytest.mark.parametrize(("length", "n", "top"), [(5, 1, 0), (5, 2, 3), (800, 1, 2)])
def test_the_log_probabilities_of_a_prompt_are_in_the_first_and_the_last_event(
    tmp_path: Path, length: int, n: int, top: int
) -> None:
    """Of each answer. However long the prompt is, as many events come."""
    count = 60

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        params = {"max_new_tokens": count, "n": n}
        body = {"input_ids": [*range(5, 5 + length)], "return_logprob": True, "logprob_start_len": 2}
        body |= {"top_logprobs_num": top, "sampling_params": params}
        whole = (await client.post(URL, json=body)).json()
        expected = [each["meta_info"] for each in (whole if n > 1 else [whole])]
        found = events((await client.post(URL, json=body | {"stream": True})).text)
        assert {each.get("index", 0) for each in found} == set(range(n))
        begun = set[int]()
        for each in found:
            about, all_of_it = each["meta_info"], expected[each.get("index", 0)]
            is_shown = each.get("index", 0) not in begun or about["finish_reason"] is not None
            begun.add(each.get("index", 0))
            of_prompt = {name: value for name, value in all_of_it.items() if name.startswith("input_")}
            assert len(of_prompt["input_token_logprobs"]) == length - 2
            assert (of_prompt if is_shown else {key: [] for key in of_prompt}).items() <= about.items()
            num_tokens = about["completion_tokens"]
            assert about["output_token_logprobs"] == all_of_it["output_token_logprobs"][:num_tokens]
        last = [each["meta_info"]["completion_tokens"] for each in found if each["meta_info"]["finish_reason"]]
        assert last == [count] * n and len(found) > 8

    with_client(tmp_path, FakeDense(lambda submit: ids(" a") * count, step_s=0.001), test)


@pytest.mark.parametrize("start", [799, -1])
def test_what_is_not_shown_of_a_prompt_makes_no_event_late(tmp_path: Path, start: int) -> None:
    count = 60

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body: dict[str, Any] = {"input_ids": [*range(5, 805)], "stream": True, "return_logprob": True}
        body |= {"logprob_start_len": start, "sampling_params": {"max_new_tokens": count, "echo": start == -1}}
        found = events((await client.post(URL, json=body)).text)
        num_shown = 1 if start == 799 else 0
        assert len(found[-1]["meta_info"]["input_token_logprobs"]) == num_shown and len(found) > 8

    with_client(tmp_path, FakeDense(lambda submit: ids(" a") * count, step_s=0.001), test)


def test_prompts_are_shared_only_with_the_same_salt_and_key(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for salt, key in (("ab", "c"), ("a", "bc"), ("abc", None), (None, "abc"), ("ab", "c")):
            params = {"max_new_tokens": 1}
            body = {"text": PROMPT, "cache_salt": salt, "extra_key": key, "sampling_params": params}
            assert (await client.post(URL, json=body)).status_code == 200
        options = {"cache_salt": "ab", "extra_key": "c", "max_tokens": 1}
        assert (await client.post(COMPLETIONS, json={"prompt": PROMPT} | options)).status_code == 200
        salts = [submit.spec.cache_salt for submit in dense.submits]
        assert len(set(salts)) == 4 and salts[0] == salts[4] == salts[5]

    dense = FakeDense(lambda submit: ids("a"))
    with_client(tmp_path, dense, test)


def test_a_prompt_may_be_computed_alone(tmp_path: Path) -> None:
    """As SGLang's own client asks for to fill the cache, and to choose among texts by their log-probabilities."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body: dict[str, Any] = {"text": PROMPT, "sampling_params": {"max_new_tokens": 0}}
        for options in ({}, {"return_logprob": True}, {"stream": True}):
            answer = await client.post(URL, json=body | options)
            found = events(answer.text)[-1] if "stream" in options else answer.json()
            about = found["meta_info"]
            assert (found["text"], found["output_ids"], about["completion_tokens"]) == ("", [], 0)
            assert about["finish_reason"] == {"type": "length", "length": 0} and about["prompt_tokens"] > 1
        chosen = {"text": [PROMPT, PROMPT + " one"], "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
        chosen |= {"return_logprob": True, "return_text_in_logprobs": True, "logprob_start_len": 1}
        for each in (await client.post(URL, json=chosen)).json():
            assert len(each["meta_info"]["input_token_logprobs"]) == each["meta_info"]["prompt_tokens"] - 1
            assert each["meta_info"]["output_token_logprobs"] == [] and each["text"] == ""
        shown = {"text": PROMPT, "sampling_params": {"max_new_tokens": 0, "echo": True}}
        assert (await client.post(URL, json=shown)).json()["text"].endswith(PROMPT)

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_a_batch_is_ended_by_its_name(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        def run(name: str | list[str]) -> asyncio.Task[httpx2.Response]:
            body = {"text": [PROMPT] * 2, "rid": name, "sampling_params": {"max_new_tokens": 1000}}
            return asyncio.create_task(client.post(URL, json=body))

        batch, other = run("x"), run(["x-y", "xx-1"])
        await until(lambda: len(dense.running) == 4)
        assert (await client.post("/abort_request", json={"rid": "x"})).status_code == 200
        assert [each["meta_info"]["finish_reason"]["type"] for each in (await batch).json()] == ["abort"] * 2
        assert not other.done()
        assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 200
        await other

    dense = FakeDense(lambda submit: [])
    with_client(tmp_path, dense, test)


@pytest.mark.parametrize(
    "abort", [{"rid": "mine"}, {"rid": "some"}, {"abort_all": True}], ids=["a name", "a batch", "all"]
)
def test_a_request_that_waits_for_memory_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abort: dict[str, Any]
) -> None:
    """One holds most of the memory with the log-probabilities that it may have, and others wait for as much."""
    budgets = set[MemoryBudget]()
    wait_for = MemoryBudget._wait_for

    async def noted(budget: MemoryBudget, place: Any) -> None:
        budgets.add(budget)
        await wait_for(budget, place)

    monkeypatch.setattr(MemoryBudget, "_wait_for", noted)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        def run(**prompts: Any) -> asyncio.Task[httpx2.Response]:
            body = {**prompts, "return_logprob": True, "top_logprobs_num": 20}
            body["sampling_params"] = {"max_new_tokens": 400}
            return asyncio.create_task(client.post(URL, json=body))

        first = run(text=PROMPT, rid="first")
        await until(lambda: len(dense.running) == 1)
        waiting = run(text=[PROMPT] * 2, rid="some") if abort.get("rid") == "some" else run(text=PROMPT, rid="mine")
        await until(lambda: bool(budgets))
        [memory] = budgets
        assert (await client.post("/abort_request", json=abort)).status_code == 200
        check_error(await waiting, 499, None, "aborted before it ran")
        assert memory.num_waiting == 0
        assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 200
        assert (await first).json()["meta_info"]["finish_reason"]["type"] == "abort"
        await until(lambda: memory.num_held == 0)

    dense = FakeDense(lambda submit: [])
    with_client(tmp_path, dense, test, max_held_bytes=150_000, max_held_wait_s=60.0)


def test_a_request_is_ended_again_while_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves what it waits for slowly. Meanwhile it is aborted again, by its name and with all others."""
    waiting, ending = set[MemoryBudget](), asyncio.Event()
    wait_for, may_end = MemoryBudget._wait_for, asyncio.Event()

    async def leave_slowly(budget: MemoryBudget, place: Any) -> None:
        waiting.add(budget)
        try:
            await wait_for(budget, place)
        finally:
            ending.set()
            await may_end.wait()

    monkeypatch.setattr(MemoryBudget, "_wait_for", leave_slowly)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        def run(name: str) -> asyncio.Task[httpx2.Response]:
            body = {"text": PROMPT, "rid": name, "return_logprob": True, "top_logprobs_num": 20}
            return asyncio.create_task(client.post(URL, json=body | {"sampling_params": {"max_new_tokens": 400}}))

        first = run("first")
        await until(lambda: len(dense.running) == 1)
        mine = run("mine")
        await until(lambda: bool(waiting))
        assert (await client.post("/abort_request", json={"rid": "mine"})).status_code == 200
        await ending.wait()
        try:
            for body in ({"rid": "mine"}, {"abort_all": True}):
                assert (await client.post("/abort_request", json=body)).status_code == 200
            assert (await first).json()["meta_info"]["finish_reason"]["type"] == "abort"
            assert not mine.done()
        finally:
            may_end.set()
        check_error(await mine, 499, None, "aborted before it ran")

    dense = FakeDense(lambda submit: [])
    with_client(tmp_path, dense, test, max_held_bytes=150_000, max_held_wait_s=60.0)


def test_one_of_a_batch_that_waits_for_memory_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One holds most of the memory. The second of the batch is being read and the third is not when they are aborted.

    The first is aborted when it runs already.
    """
    waiting = list[MemoryBudget]()
    wait_for = MemoryBudget._wait_for

    async def noted(budget: MemoryBudget, place: Any) -> None:
        waiting.append(budget)
        await wait_for(budget, place)

    monkeypatch.setattr(MemoryBudget, "_wait_for", noted)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        def run(max_tokens: list[int], **body: Any) -> asyncio.Task[httpx2.Response]:
            params = [{"max_new_tokens": each} for each in max_tokens]
            body |= {"text": [PROMPT] * len(params), "sampling_params": params}
            return asyncio.create_task(client.post(URL, json=body | {"return_logprob": True, "top_logprobs_num": 20}))

        async def abort(name: str) -> None:
            assert (await client.post("/abort_request", json={"rid": name})).status_code == 200

        first = run([400], rid=["first"])
        await until(lambda: len(dense.running) == 1)
        batch = run([5, 390, 5, 5], rid="x")
        await until(lambda: bool(waiting) and len(dense.running) == 2)
        for name in ("x-0", "x-1", "x-2"):
            await abort(name)
        await until(lambda: len(dense.running) == 1)
        assert not batch.done()
        await abort("first")
        await first
        await until(lambda: dense.submits[-1].spec.request_id == "x-3" and len(dense.running) == 1)
        await abort("x-3")
        assert [each["meta_info"]["finish_reason"]["type"] for each in (await batch).json()] == ["abort"] * 4
        await until(lambda: waiting[0].num_held == 0)

    dense = FakeDense(lambda submit: [])
    with_client(tmp_path, dense, test, max_held_bytes=150_000, max_held_wait_s=60.0)


def test_requests_are_ended_by_name_or_all(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async def run(name: str) -> Any:
            body = {"text": PROMPT, "rid": name, "sampling_params": {"max_new_tokens": 1000}}
            return (await client.post(URL, json=body)).json()["meta_info"]["finish_reason"]["type"]

        running = {name: asyncio.create_task(run(name)) for name in ("a", "b", "c")}
        await until(lambda: len(dense.running) == 3)
        for body in ({"rid": "other"}, {"rid": "b"}):
            assert (await client.post("/abort_request", json=body)).status_code == 200
        assert await running["b"] == "abort" and not running["a"].done()
        assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 200
        assert [await running[name] for name in ("a", "c")] == ["abort", "abort"]
        await until(lambda: not dense.running)
        refused = await client.post("/abort_request", json={"abort_all": False})
        assert refused.status_code == 400 and "rid" in refused.json()["error"]["message"]

    dense = FakeDense(lambda submit: [])
    with_client(tmp_path, dense, test)


def test_each_prompt_may_have_its_own_options(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        params = [{"max_new_tokens": 2, "temperature": 0.5}, {"max_new_tokens": 3, "sampling_seed": 7}]
        body = {"text": ["a", "b"], "sampling_params": params, "rid": ["x", "y"]}
        first, second = (await client.post(URL, json=body)).json()
        assert [len(each["output_ids"]) for each in (first, second)] == [2, 3]
        assert [each["meta_info"]["id"] for each in (first, second)] == ["x", "y"]
        streamed = events((await client.post(URL, json=body | {"stream": True})).text)
        assert {each["meta_info"]["id"] for each in streamed} == {"x", "y"}
        specs = {each.spec.request_id: each.spec for each in dense.submits[:2]}
        assert specs["x"].sampling.temperature == 0.5 and specs["y"].sampling.seed == 7

    dense = FakeDense(lambda submit: ids(" a") * submit.spec.max_tokens)
    with_client(tmp_path, dense, test)


def test_prompts_are_given_as_token_ids_if_asked_for(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"text": ["a", "b c"], "sampling_params": {"max_new_tokens": 1}}
        asked = {"return_prompt_token_ids": True}
        found = (await client.post(URL, json=body | asked)).json()
        assert [each["prompt_token_ids"] for each in found] == [REFERENCE(text)["input_ids"] for text in body["text"]]
        assert [each["meta_info"]["weight_version"] for each in found] == ["c0ffee"] * 2
        assert "prompt_token_ids" not in (await client.post(URL, json=body)).json()[0]
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        [choice] = (await client.post("/v1/chat/completions", json=chat | asked)).json()["choices"]
        assert choice["prompt_token_ids"] == list(dense.submits[-1].spec.prompt_token_ids)
        for path, given in ((URL, body), ("/v1/chat/completions", chat)):
            refused = await client.post(path, json=given | asked | {"stream": True})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "return_prompt_token_ids"

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)


def test_the_server_tells_its_model_and_its_limits(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        model = (await client.get("/get_model_info")).json()
        assert model == (await client.get("/model_info")).json()
        assert model["is_generation"] and not model["has_image_understanding"] and not model["has_audio_understanding"]
        server = (await client.get("/get_server_info")).json()
        assert server["model_path"] == model["model_path"] and server["status"] == "ready"
        assert server["context_length"] == dense.info.max_model_len and server["num_open_requests"] == 0
        assert server["max_total_num_tokens"] is server["page_size"] is None  # no attention worker runs here
        assert (await client.get("/health_generate")).status_code == 200
        for path in ("/weight_version", "/get_weight_version"):
            assert (await client.get(path)).json() == {"weight_version": model["weight_version"]}
        refused = await client.get("/get_load")  # no attention worker runs here
        assert refused.status_code == 503 and "how busy" in refused.json()["error"]["message"]
        counted = (await client.post("/v1/tokenize", json={"prompt": PROMPT})).json()
        assert counted["count"] == len(counted["tokens"]) and counted["max_model_len"] == server["context_length"]

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)


NAMED: dict[str, Any] = {"text": "a", "return_logprob": True}
WRONG: list[tuple[dict[str, Any], str, list[str]]] = [
    (NAMED | {"token_ids_logprob": [-1]}, "token_ids_logprob", ["out-of-vocabulary", "-1"]),
    (NAMED | {"token_ids_logprob": [2 * 10**9]}, "token_ids_logprob", ["out-of-vocabulary", "2000000000"]),
    (NAMED | {"token_ids_logprob": [5, 2**40]}, "token_ids_logprob", ["out-of-vocabulary", str(2**40)]),
    (NAMED | {"token_ids_logprob": [[0], [1, 2]]}, "token_ids_logprob", ["flat list of integers"]),
    (NAMED | {"text": ["a", "b"], "token_ids_logprob": [[0], [-1]]}, "token_ids_logprob", ["out-of-vocabulary", "-1"]),
    ({}, "text", ["exactly one of text and input_ids"]),
    ({"text": "a", "input_ids": [5]}, "text", ["exactly one"]),
    ({"input_ids": "abc"}, "input_ids", ["token ids"]),
    ({"input_ids": ["abc"]}, "input_ids", ["token ids"]),
    ({"input_ids": [10**9]}, "input_ids", ["input_ids[0] is 1000000000", "vocabulary"]),
    ({"text": []}, "text", ["0 prompts"]),
    ({"text": ["a"] * 65}, "text", ["65", "64"]),
    ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature", ["-1"]),
    ({"text": "a", "sampling_params": {"top_p": "x"}}, "sampling_params.top_p", ["'x'"]),
    ({"text": "a", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens", ["not supported"]),
    ({"text": "a", "sampling_params": {"stop_regex": "(x"}}, "stop_regex", ["'(x'", "missing )"]),
    ({"text": "a", "sampling_params": {"stop_regex": ["x"] * 17}}, "sampling_params.stop_regex", ["17", "16"]),
    ({"text": "a", "sampling_params": {"stop_regex": "x" * 257}}, "stop_regex", ["257", "256"]),
    ({"text": "a", "sampling_params": {"stop_regex": "x{300}"}}, "stop_regex", ["256"]),
    ({"text": "a", "sampling_params": {"sampling_seed": 2**63}}, "sampling_params.sampling_seed", [str(2**63)]),
    ({"text": "a", "sampling_params": [{}]}, "sampling_params", []),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params", ["has 1 elements for 2 prompts"]),
    ({"text": ["a", "b"], "sampling_params": [{}, {"n": 2}]}, "sampling_params", ["n must be the same"]),
    ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": "x"}]}, "sampling_params[1].top_p", ["'x'"]),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid", ["has 1 elements for 2 prompts"]),
    ({"text": "a", "lora_path": ["x"]}, "lora_path", ["is a list, which is for a list of prompts"]),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num", ["1000000"]),
    ({"text": "a", "image_data": ["x"]}, "image_data", ["not supported"]),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[httpx2.Response]:
    """One gateway's answers to all wrong bodies, after which it answers a right one."""
    bodies = [*(body for body, _, _ in WRONG), {"text": "a", "sampling_params": {"max_new_tokens": 1}}]
    *found, right = answers_to(tmp_path_factory.mktemp("refusals"), FakeDense(say(" one")), URL, bodies)
    assert right.status_code == 200, right.text
    return found


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[str(body)[:60] for body, _, _ in WRONG])
def test_a_wrong_body_is_a_400_that_names_the_field(refusals: list[httpx2.Response], number: int) -> None:
    _, param, words = WRONG[number]
    check_error(refusals[number], 400, param, *words)


def test_an_unknown_adapter_is_a_404(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        check_error(await client.post(URL, json={"text": "a", "lora_path": "sql"}), 404, "lora_path", "sql")

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_hidden_states_are_refused_by_name_where_the_backend_has_none(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post(URL, json={"text": PROMPT, "return_hidden_states": True})
        check_error(response, 400, "return_hidden_states", "dense.backend must be torch")
        assert not dense.submits

    dense = FakeDense(lambda submit: [*ids(TEXT), EOS])
    dense.info.hidden_size = 0  # as a worker with TensorRT says
    with_client(tmp_path, dense, test)
