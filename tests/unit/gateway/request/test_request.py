"""Every rule for requests in the comments of gateway.proto and sampling.proto."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from services.common.config import EMBEDDED_MODEL
from services.common.errors import ContextLengthExceeded, InvalidRequest, TwostrokeError
from services.common.sampling_params import SamplingParams
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.model_limits import LocalModel, ModelLimits, ModelNames
from services.gateway.request.read_request import check_counts, read_request, read_text_or_chat
from services.gateway.text.tokenizer import load_tokenizer
from services.pb import gateway_pb2
from services.step import SequenceSpec
from tests.support.reports import prompt_logprobs

TOKENIZER = load_tokenizer(EMBEDDED_MODEL)
LIMITS = ModelLimits(
    LocalModel(TOKENIZER, eos_token_ids=(2, 7)),
    vocab_size=1000,
    max_model_len=64,
    names=ModelNames(("tiny", "small"), accepts_any=False, root="/models/tiny"),
    max_prompts=64,
    max_n=4,
    max_logprobs=20,
    max_beam_width=16,
)
IDS = {"prompt_token_ids": {"ids": [5, 6, 7]}}


def read(fields: dict[str, Any], limits: ModelLimits = LIMITS) -> GenerationRequest:
    message = gateway_pb2.GenerateRequest(**fields)
    check_counts(message)
    return asyncio.run(read_request(message, limits))


def test_unset_fields_take_the_defaults_of_the_proto() -> None:
    request = read(IDS)
    assert request.spec.prompt_token_ids == [5, 6, 7]
    assert request.max_tokens == 64 - 3
    assert request.stop == ()
    assert request.spec.stop_token_ids == (2, 7)
    assert request.skip_special_tokens
    assert not request.include_stop_str_in_output
    assert request.spec.cache_salt == ""
    seed = request.spec.sampling.seed
    assert request.spec.sampling == SamplingParams(
        temperature=1.0,
        top_k=None,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        min_tokens=0,
        seed=seed,
    )


def test_each_request_without_id_and_seed_gets_random_ones() -> None:
    requests = [read(IDS) for _ in range(8)]
    assert len({request.spec.request_id for request in requests}) == 8
    assert len({request.spec.sampling.seed for request in requests}) == 8
    assert all(0 <= request.spec.sampling.seed < 2**64 for request in requests)


@pytest.mark.parametrize(("top_k", "used"), [(1000, 1000), (1001, None), (2**31 - 1, None)])
def test_a_top_k_above_the_vocabulary_keeps_all_tokens(top_k: int, used: int | None) -> None:
    assert read({**IDS, "sampling": {"top_k": top_k}}).spec.sampling.top_k == used


def test_given_fields_are_kept() -> None:
    sampling = {
        "temperature": 0.0,
        "top_k": 1000,
        "top_p": 0.25,
        "min_p": 1.0,
        "repetition_penalty": 100.0,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "min_tokens": 9,
        "seed": 2**64 - 1,
    }
    request = read(
        {
            **IDS,
            "request_id": "mine",
            "sampling": sampling,
            "max_tokens": 61,
            "stop": ["a", "b" * 256],
            "stop_token_ids": [999, 2, 0],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "cache_salt": "tenant",
            "model": "tiny",
            "n": 2,
            "best_of": 3,
            "logprobs": 0,
            "prompt_logprobs": 20,
            "echo": True,
            "priority": -100,
            "user": "somebody",
        }
    )
    asked = SequenceSpec(
        request_id="mine",
        prompt_token_ids=[5, 6, 7],
        sampling=SamplingParams(**sampling),
        max_tokens=61,
        stop_token_ids=(0, 2, 7, 999),
        cache_salt="tenant",
        num_logprobs=0,
        features=prompt_logprobs(20),
        priority=-100,
    )
    assert request == GenerationRequest(
        asked,
        wants_output=True,
        stop=("a", "b" * 256),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        n=2,
        best_of=3,
        num_logprobs=0,
        prompt_text=None,
        echo=True,
        priority=-100,
        user="somebody",
    )


def test_a_seed_of_zero_is_not_replaced() -> None:
    assert read({**IDS, "sampling": {"seed": 0}}).spec.sampling.seed == 0


def test_a_priority_of_zero_is_not_the_default() -> None:
    assert read({**IDS, "priority": 0}).priority == 0
    assert read(IDS).priority is None


def test_ignored_eos_does_not_stop() -> None:
    assert read({**IDS, "ignore_eos": True, "stop_token_ids": [3]}).spec.stop_token_ids == (3,)


def test_the_longest_prompt_leaves_one_token() -> None:
    assert read({"prompt_token_ids": {"ids": [1] * 63}}).max_tokens == 1


def test_a_default_of_max_tokens_is_lowered_to_the_context() -> None:
    assert read({"prompt_token_ids": {"ids": [1] * 47}, "default_max_tokens": 16}).max_tokens == 16
    assert read({"prompt_token_ids": {"ids": [1] * 49}, "default_max_tokens": 16}).max_tokens == 15
    assert read({**IDS, "max_tokens": 20, "default_max_tokens": 16}).max_tokens == 20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"exactly one of prompt, prompt_token_ids, chat, prompt_embeds is required"),
        ({"prompt": ""}, r"prompt is empty"),
        ({"prompt_token_ids": {}}, r"no tokens"),
        ({"chat": {}}, r"chat has no messages"),
        ({"chat": {"messages": [{"content": "hi"}]}}, r"messages\[0\].role is empty"),
        ({"chat": {"messages": [{"role": "user", "content": "a", "name": "x" * 65}]}}, r"\[0\].name has 65 ch"),
        ({"chat": {"messages": [{"role": "x" * 65, "content": "a"}]}}, r"\[0\].role has 65 characters, at most 64"),
        ({"chat": {"messages": [{"role": "oracle", "content": "hi"}]}}, r"oracle"),
        ({"prompt_token_ids": {"ids": [0, 999, 1000]}}, r"prompt\[2\] is 1000, out of vocabulary: must be in"),
        ({"prompt_token_ids": {"ids": [0, -1]}}, r"-1, out of vocabulary: must be greater than or equal to 0 and "),
        ({"prompt_token_ids": {"ids": [2**63 - 1]}}, r"prompt\[0\] is 9223372036854775807"),
        ({**IDS, "max_tokens": 0}, r"max_tokens is 0, must be at least 1, or 0 with echo, prompt_logprobs, "),
        ({**IDS, "max_tokens": 0, "logprobs": 2}, r"max_tokens is 0, must be at least 1"),
        ({**IDS, "max_tokens": -1, "echo": True}, r"max_tokens is -1, must be at least 1"),
        ({**IDS, "max_tokens": 0, "echo": True, "n": 2}, r"best_of or n is 2, must be 1 where max_tokens is 0"),
        ({**IDS, "max_tokens": 0, "echo": True, "best_of": 3}, r"best_of or n is 3"),
        ({**IDS, "max_tokens": 0, "echo": True, "sampling": {"min_tokens": 1}}, r"min_tokens is 1, max_tokens is 0"),
        ({**IDS, "max_tokens": -5}, r"max_tokens is -5, must be at least 1"),
        ({**IDS, "request_id": "x" * 129}, r"request_id has 129 characters, at most 128"),
        ({**IDS, "request_id": "a\nb"}, r"request_id is 'a\\nb', must be printable"),
        ({**IDS, "stop": ["x"] * 17}, r"stop has 17 strings, at most 16"),
        ({**IDS, "stop": ["x", ""]}, r"stop\[1\] has 0 characters"),
        ({**IDS, "stop": ["x" * 257]}, r"stop\[0\] has 257 characters, must have 1 to 256"),
        ({**IDS, "stop_token_ids": [1] * 65}, r"stop_token_ids has 65 ids, at most 64"),
        ({**IDS, "stop_token_ids": [1000]}, r"stop_token_ids\[0\] is 1000, out of vocabulary: "),
        ({**IDS, "sampling": {"temperature": math.nan}}, r"temperature is nan"),
        ({**IDS, "sampling": {"temperature": -0.1}}, r"temperature is -0.1"),
        ({**IDS, "sampling": {"top_p": 0.0}}, r"top_p is 0"),
        ({**IDS, "sampling": {"min_p": math.inf}}, r"min_p is inf"),
        ({**IDS, "sampling": {"repetition_penalty": 0.0}}, r"repetition_penalty is 0"),
        ({**IDS, "sampling": {"presence_penalty": 2.5}}, r"presence_penalty is 2.5"),
        ({**IDS, "sampling": {"frequency_penalty": -2.5}}, r"frequency_penalty is -2.5"),
        ({**IDS, "sampling": {"top_k": 0}}, r"top_k is 0"),
        ({**IDS, "sampling": {"min_tokens": -1}}, r"min_tokens is -1"),
        ({**IDS, "sampling": {"min_tokens": 6}, "max_tokens": 5}, r"min_tokens is 6, max_tokens is 5"),
    ],
)
def test_a_wrong_request_is_refused_with_its_value_and_limit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(fields)


STRICT = replace(LIMITS, strict_max_tokens=True)
TOO_LONG: list[tuple[ModelLimits, dict[str, Any], str, str]] = [
    (LIMITS, {"prompt_token_ids": {"ids": [1] * 64}}, "prompt", "65 were requested: 64 of the prompt and 1 "),
    (LIMITS, {"prompt": "word " * 200}, "prompt", "tokens, but at least "),
    (LIMITS, {"prompt": "word " * 500}, "prompt", "but the text has 2500 characters, and a token at most "),
    (LIMITS, {"chat": {"messages": [{"role": "user", "content": "word " * 200}]}}, "prompt", "but at least "),
    (STRICT, {**IDS, "max_tokens": 62}, "max_tokens", "65 were requested: 3 of the prompt and 62 by max_tokens"),
    (LIMITS, {**IDS, "max_tokens": 99, "sampling": {"min_tokens": 62}}, "min_tokens", "3 of the prompt and 62 by min"),
    (LIMITS, {**IDS, "sampling": {"min_tokens": 62}}, "min_tokens", "65 were requested"),
]


@pytest.mark.parametrize(("limits", "fields", "param", "message"), TOO_LONG)
def test_a_context_overflow_is_recognised_by_clients(
    limits: ModelLimits, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        read(fields, limits)
    assert str(caught.value).startswith("This model's maximum context length is 64 tokens, but ")
    assert message in str(caught.value)
    assert "context_length_exceeded" in str(caught.value), "for clients that read only the text"
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


@pytest.mark.parametrize(("given", "taken"), [(60, 60), (61, 61), (62, 61), (2**63 - 1, 61)])
def test_max_tokens_is_lowered_to_what_the_context_leaves(given: int, taken: int) -> None:
    assert read({**IDS, "max_tokens": given}).max_tokens == taken
    assert read({**IDS, "max_tokens": given, "sampling": {"min_tokens": taken}}).max_tokens == taken
    if given == taken:
        assert read({**IDS, "max_tokens": given}, STRICT).max_tokens == taken


def test_a_message_of_an_assistant_may_be_empty() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant"}, {"role": "user", "content": "hi?"}]
    expected = TOKENIZER.hf_tokenizer.apply_chat_template(
        [{"content": "", **message} for message in chat], add_generation_prompt=True, return_dict=False
    )
    assert read({"chat": {"messages": chat}}).spec.prompt_token_ids == expected


@pytest.mark.parametrize("wish", [{"echo": True}, {"prompt_logprobs": 0}])
def test_requests_for_the_prompt_alone_generate_no_tokens(wish: dict[str, Any]) -> None:
    assert read({**IDS, "max_tokens": 0, **wish}).max_tokens == 0
    longest = {"prompt_token_ids": {"ids": [1] * 63}}
    assert read({**longest, "max_tokens": 0, **wish}).max_tokens == 0
    with pytest.raises(ContextLengthExceeded):
        read({"prompt_token_ids": {"ids": [1] * 64}, "max_tokens": 0, **wish})


def test_token_ids_beyond_the_models_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"out of vocabulary: must be in \[0, 3\)"):
        read({"prompt": "hello"}, replace(LIMITS, vocab_size=3))


def test_tokenizing_nothing_is_refused_but_not_an_empty_text() -> None:
    with pytest.raises(InvalidRequest, match="exactly one of text, chat"):
        asyncio.run(read_text_or_chat(gateway_pb2.TokenizeRequest(), TOKENIZER))
    token_ids, _ = asyncio.run(read_text_or_chat(gateway_pb2.TokenizeRequest(text=""), TOKENIZER))
    assert token_ids == TOKENIZER.hf_tokenizer.encode("")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop": [""] * 17}, "stop has 17 strings, at most 16 allowed"),
        ({"stop_token_ids": [-1] * 65}, "stop_token_ids has 65 ids, at most 64 allowed"),
        ({"bad_words": [""] * 65}, "bad_words has 65 strings, at most 64 allowed"),
        ({"sampling": {"bad_words": [{}] * 129}}, "bad_words has 129 words, at most 128 allowed"),
        ({"sampling": {"logit_bias": dict.fromkeys(range(1025), 200.0)}}, "logit_bias has 1025 tokens, at most 1024"),
        ({"sampling": {"allowed_token_ids": [-1 % 2**32] * 1025}}, "allowed_token_ids has 1025 tokens, at most 1024"),
        ({"chat": {"messages": [{}] * 4097}}, "messages has 4097 elements, at most 4096 allowed"),
        ({"prompt_token_ids": {"ids": [-1] * 100}}, "64 tokens"),
    ],
)
def test_the_length_of_a_list_is_checked_before_its_elements(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read({**IDS, **fields})


def test_a_salt_has_a_length_limit_and_is_not_shown() -> None:
    assert read({**IDS, "cache_salt": "x" * 256}).spec.cache_salt == "x" * 256
    with pytest.raises(InvalidRequest, match=r"^cache_salt has 257 characters, at most 256 allowed$") as refused:
        read({**IDS, "cache_salt": "x" * 257})
    assert refused.value.param == "cache_salt"


@pytest.mark.parametrize("field", ["model", "request_id", "user", "cache_salt"])
def test_an_error_quotes_little_of_a_long_text(field: str) -> None:
    with pytest.raises(TwostrokeError) as refused:
        read({**IDS, field: "\n" * 2_000_000})
    assert len(str(refused.value)) < 400
