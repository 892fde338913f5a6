"""Converts the fields that dialects share to gRPC messages: all limits are checked in one place, `gateway/request/`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import to_json

from services.common.errors import InvalidRequest
from services.common.sampling_params import NUMBERS
from services.gateway.apis.shared.generation_fields import BeamFields, SamplingFields
from services.gateway.apis.shared.request_model import RequestModel
from services.gateway.apis.shared.structured_output import StructuredOutputFields, structured_output_of
from services.gateway.features.prompt_logprobs import MAX_PROMPT_LOGPROBS
from services.gateway.request.model_limits import ModelLimits
from services.gateway.request.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from services.pb import gateway_pb2, sampling_pb2

ALL = -1  # as in vLLM: the whole vocabulary, or as much of the prompt as fits
# Options that are each within its own limit have hardly more; copies for 64 prompts take 50 ms.
MAX_COPIED_BYTES = 3 * 2**18
SAME_FIELDS = (
    "add_special_tokens",
    "cache_salt",
    "ignore_eos",
    "include_stop_str_in_output",
    "n",
    "priority",
    "skip_special_tokens",
    "user",
)


def json_text(value: Any) -> str:
    """The JSON of a field that is empty without a value."""
    return to_json(value).decode() if value else ""


def thinking_variables(is_on: bool) -> dict[str, bool]:
    """The variables of chat templates that switch reasoning on or off: a template knows one of them."""
    return {"enable_thinking": is_on, "thinking": is_on}


def sampling_options(body: RequestModel, defaults: SamplingDefaults) -> dict[str, Any]:
    """The options of `SamplingParams` that a body gives in fields of its own: numbers, `top_k` and the seed.

    `defaults` are those of options that it does not give.
    """
    options = {**defaults, **_given(body, _option_names(type(body)))}
    if options.get("top_k") in (0, -1):
        del options["top_k"]
    if "seed" in options:
        options["seed"] %= 2**64
    return options


@functools.cache
def _option_names(kind: type[RequestModel]) -> tuple[str, ...]:
    """Which of these fields bodies of this kind have: what else a client sends are attributes, too."""
    return tuple(name for name in (*NUMBERS, "top_k", "seed") if name in kind.model_fields)


def sampling_message(
    body: SamplingFields, defaults: SamplingDefaults = NO_DEFAULTS
) -> gateway_pb2.GenerateRequest:
    """A message with these fields, still without a prompt. `defaults`: see `sampling_options`."""
    sampling = sampling_options(body, defaults)
    if body.allowed_token_ids:
        sampling["allowed_token_ids"] = body.allowed_token_ids
    message = gateway_pb2.GenerateRequest(
        sampling=sampling_pb2.SamplingParams(**sampling),
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        stop_regex=[body.stop_regex] if isinstance(body.stop_regex, str) else body.stop_regex,
        stop_token_ids=body.stop_token_ids,
        bad_words=body.bad_words,
        truncate_prompt_tokens=0 if body.truncate_prompt_tokens == ALL else body.truncate_prompt_tokens,
        keep_first_tokens=body.truncation_side == "right",
        **_given(body, SAME_FIELDS),
    )
    if body.stop_regex == "":  # SGLang's value for none
        message.ClearField("stop_regex")
    if body.no_stop_trim:
        message.include_stop_str_in_output = True
    return message


def message_with(defaults: SamplingDefaults = NO_DEFAULTS, **options: Any) -> gateway_pb2.GenerateRequest:
    """The same for options that a dialect has under other names; here they have those of `SamplingFields`."""
    return sampling_message(SamplingFields.model_construct(**options), defaults)


def add_extra_key(message: gateway_pb2.GenerateRequest, extra_key: str | None) -> None:
    """Only requests with the same salt and SGLang's `extra_key` share prefixes: "ab" and "c" are not "a" and "bc"."""
    if extra_key:
        message.cache_salt = f"{len(message.cache_salt)}:{message.cache_salt}{extra_key}"


def add_structured_output(message: gateway_pb2.GenerateRequest, body: StructuredOutputFields) -> None:
    """Adds how the answers are structured."""
    if (structure := structured_output_of(body)) is not None:
        message.sampling.structured_output.CopyFrom(structure)


def add_beams(message: gateway_pb2.GenerateRequest, body: BeamFields) -> None:
    """Adds which answers are the best."""
    if body.best_of is not None:
        message.best_of = body.best_of
    if body.use_beam_search:
        stopping = {
            "never": sampling_pb2.EARLY_STOPPING_NEVER,
            True: sampling_pb2.EARLY_STOPPING_ALWAYS,
        }.get(body.early_stopping, sampling_pb2.EARLY_STOPPING_HEURISTIC)
        search = sampling_pb2.BeamSearch(length_penalty=body.length_penalty, early_stopping=stopping)
        message.beam_search.CopyFrom(search)


def add_logit_bias(message: gateway_pb2.GenerateRequest, bias: dict[str, float] | None) -> None:
    """Adds a `LogitBias`."""
    if bias:
        message.sampling.logit_bias.update({int(token_id): value for token_id, value in bias.items()})


def add_echo(message: gateway_pb2.GenerateRequest) -> None:
    """Asks for the prompt, with as many log-probabilities as the answer has, unless the message has another number.

    Raises `InvalidRequest` for more than a prompt can have.
    """
    message.echo = True
    if message.HasField("logprobs") and not message.HasField("prompt_logprobs"):
        if message.logprobs > MAX_PROMPT_LOGPROBS:
            text = f"logprobs is {message.logprobs}, with echo it must be from 0 to {MAX_PROMPT_LOGPROBS}"
            raise InvalidRequest(text, "logprobs")
        message.prompt_logprobs = message.logprobs


def check_copied(common: gateway_pb2.GenerateRequest, num_prompts: int) -> None:
    """Raises `InvalidRequest` for options of which copies for several prompts would take much memory, and long."""
    if num_prompts > 1 and (num_bytes := common.ByteSize()) > MAX_COPIED_BYTES:
        raise InvalidRequest(
            f"the options have {num_bytes} bytes, with several prompts at most {MAX_COPIED_BYTES} allowed: send the "
            "prompts one by one"
        )


def messages_of(
    common: gateway_pb2.GenerateRequest,
    prompts: Sequence[str | Sequence[int] | gateway_pb2.PromptEmbeds],
    request_id: str,
    limits: ModelLimits,
) -> list[gateway_pb2.GenerateRequest]:
    """One message per prompt; the ids of several prompts are numbered. Raises `InvalidRequest` for large options."""
    check_copied(common, len(prompts))
    messages = []
    for i, prompt in enumerate(prompts):
        message = gateway_pb2.GenerateRequest()
        message.CopyFrom(common)
        message.request_id = request_id if len(prompts) == 1 else f"{request_id}-{i}"
        if isinstance(prompt, str):
            message.prompt = prompt
        elif isinstance(prompt, gateway_pb2.PromptEmbeds):
            message.prompt_embeds.CopyFrom(prompt)
        else:
            if common.HasField("truncate_prompt_tokens"):  # copy no more tokens than can be kept
                most = limits.max_prompt_len
                prompt = prompt[:most] if common.keep_first_tokens else prompt[-most:]
            message.prompt_token_ids.ids.extend(prompt)
        messages.append(message)
    return messages


def _given(body: RequestModel, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(body, name)) is not None}
