"""From what a client sent to a request that can run: every limit is checked here, before anything starts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import InvalidRequest
from services.common.sampling_messages import decode_sampling
from services.common.sampling_params import SamplingParams
from services.gateway.tokenizer import Message, Tokenizer
from services.pb import gateway_pb2

MAX_REQUEST_ID_CHARACTERS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 256
MAX_STOP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against."""

    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A valid request with every default filled in. Its list belongs to it and never changes."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int  # output tokens
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]  # the request's own and, unless ignored, EOS
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    cache_salt: str


async def read_request(
    message: gateway_pb2.GenerateRequest, tokenizer: Tokenizer, limits: ModelLimits
) -> GenerationRequest:
    """Raises `InvalidRequest` for the first thing that is wrong; tokenizes only what is right otherwise."""
    _check_request_id(message.request_id)
    sampling = _read_sampling(message, limits)
    if message.HasField("max_tokens") and message.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {message.max_tokens}, must be at least 1")
    _check_stop_strings(message.stop)
    _check_stop_token_ids(message.stop_token_ids, limits.vocab_size)
    if message.WhichOneof("input") == "prompt_token_ids":
        prompt_token_ids = list(message.prompt_token_ids.ids)
    else:
        _check_size(message, tokenizer, limits)
        prompt_token_ids = await read_text_or_chat(message, tokenizer)
    _check_prompt(prompt_token_ids, limits)
    max_tokens = _read_max_tokens(message, len(prompt_token_ids), limits.max_model_len)
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is {sampling.min_tokens}, max_tokens is {max_tokens}")
    eos_token_ids = () if message.ignore_eos else limits.eos_token_ids
    return GenerationRequest(
        request_id=message.request_id or f"gen-{secrets.token_hex(8)}",
        prompt_token_ids=prompt_token_ids,
        sampling=sampling,
        max_tokens=max_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(dict.fromkeys((*eos_token_ids, *message.stop_token_ids))),
        include_stop_str_in_output=message.include_stop_str_in_output,
        skip_special_tokens=not message.HasField("skip_special_tokens") or message.skip_special_tokens,
        cache_salt=message.cache_salt,
    )


async def read_text_or_chat(
    message: gateway_pb2.GenerateRequest | gateway_pb2.TokenizeRequest, tokenizer: Tokenizer
) -> list[int]:
    """Token ids of a message's text or chat. Raises `InvalidRequest` if it is missing, empty or unusable."""
    kind = message.WhichOneof("input")
    if kind is None:
        names = ", ".join(field.name for field in message.DESCRIPTOR.oneofs_by_name["input"].fields)
        raise InvalidRequest(f"nothing to read: exactly one of {names} is required")
    if kind != "chat":
        text = getattr(message, kind)
        if not text:
            raise InvalidRequest(f"{kind} is empty")
        return await tokenizer.encode(text)
    messages = [Message(each.role, each.content) for each in message.chat.messages]
    if not messages:
        raise InvalidRequest("chat has no messages, at least 1 is required")
    for i, each in enumerate(messages):
        if not each.role or not each.content:
            raise InvalidRequest(f"chat message {i} has no {'content' if each.role else 'role'}")
    return await tokenizer.encode_chat(messages)


def _check_size(message: gateway_pb2.GenerateRequest, tokenizer: Tokenizer, limits: ModelLimits) -> None:
    """Refuses a text that cannot fit, whatever its tokens are, before it costs memory to find them."""
    num_characters = len(message.prompt) + sum(len(each.content) for each in message.chat.messages)
    most = limits.max_model_len * tokenizer.max_token_characters
    if num_characters > most:
        raise InvalidRequest(
            f"the text has {num_characters} characters; max_model_len is {limits.max_model_len} tokens "
            f"of {tokenizer.max_token_characters} characters at the most"
        )


def _check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise InvalidRequest(
            f"request_id has {len(request_id)} characters, at most {MAX_REQUEST_ID_CHARACTERS} allowed"
        )
    if not request_id.isprintable():  # it goes into logs of three services
        raise InvalidRequest(f"request_id is {request_id!r}, must be printable characters")


def _read_sampling(message: gateway_pb2.GenerateRequest, limits: ModelLimits) -> SamplingParams:
    sampling = decode_sampling(message.sampling, seed=secrets.randbits(64))
    sampling.validate()
    sampling.validate_token_ids(limits.vocab_size)
    return sampling


def _check_stop_strings(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop has {len(stop)} strings, at most {MAX_STOP_STRINGS} allowed")
    for i, string in enumerate(stop):
        if not 1 <= len(string) <= MAX_STOP_STRING_CHARACTERS:
            raise InvalidRequest(
                f"stop[{i}] has {len(string)} characters, must have 1 to {MAX_STOP_STRING_CHARACTERS}"
            )


def _check_stop_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    if len(token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"stop_token_ids has {len(token_ids)} ids, at most {MAX_STOP_TOKENS} allowed")
    _check_token_ids("stop_token_ids", token_ids, vocab_size)


def _check_prompt(token_ids: Sequence[int], limits: ModelLimits) -> None:
    if not token_ids:
        raise InvalidRequest("the prompt has no tokens, at least 1 is required")
    if len(token_ids) >= limits.max_model_len:
        raise InvalidRequest(
            f"the prompt has {len(token_ids)} tokens, max_model_len is {limits.max_model_len}"
            " and one token must remain for the answer"
        )
    _check_token_ids("prompt_token_ids", token_ids, limits.vocab_size)


def _check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    i = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
    raise InvalidRequest(f"{name}[{i}] is {token_ids[i]}, must be in [0, {vocab_size}), the vocab_size")


def _read_max_tokens(message: gateway_pb2.GenerateRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    room = max_model_len - num_prompt_tokens
    if not message.HasField("max_tokens"):
        return room
    if message.max_tokens > room:
        raise InvalidRequest(
            f"max_tokens is {message.max_tokens}, but max_model_len is {max_model_len}"
            f" and the prompt has {num_prompt_tokens} tokens, which leaves {room}"
        )
    return message.max_tokens
