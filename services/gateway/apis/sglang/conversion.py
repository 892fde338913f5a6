"""Converts bodies of SGLang's /generate to gRPC messages."""

from __future__ import annotations

from typing import Any

from services.gateway.apis.sglang.schema import DEFAULT_TOKENS, OF_EACH_PROMPT, GenerateBody, GenerateSampling
from services.gateway.apis.shared.feature_fields import add_features
from services.gateway.apis.shared.to_message import (
    add_beams,
    add_echo,
    add_extra_key,
    add_logit_bias,
    add_structured_output,
    check_copied,
    messages_of,
    sampling_message,
)
from services.gateway.request.model_limits import ModelLimits
from services.pb import gateway_pb2


def generate_messages(
    body: GenerateBody, request_id: str, limits: ModelLimits
) -> list[gateway_pb2.GenerateRequest]:
    """One message per prompt. Raises `InvalidRequest`."""
    messages = []
    made = dict[tuple[Any, ...], gateway_pb2.GenerateRequest]()  # by options
    for index, (prompt, each) in enumerate(zip(body.prompts, body.each, strict=True)):
        options = [getattr(each, name) for name in OF_EACH_PROMPT if name != "token_ids_logprob"]
        key = tuple(id(value) if isinstance(value, GenerateSampling) else value for value in options)
        if (common := made.get(key)) is None:
            common = made[key] = _common_message(each)
            check_copied(common, len(body.prompts))
        [message] = messages_of(common, [prompt], body.name_of(index, request_id), limits)
        message.sampling.logprob_token_ids.extend(each.token_ids_logprob or ())
        messages.append(message)
    return messages


def _common_message(body: GenerateBody) -> gateway_pb2.GenerateRequest:
    """Everything of one prompt's body but the prompt."""
    params = body.sampling_params
    common = sampling_message(params)
    common.max_tokens = DEFAULT_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    if params.min_new_tokens is not None:
        common.sampling.min_tokens = params.min_new_tokens
    if params.sampling_seed is not None:
        common.sampling.seed = params.sampling_seed % 2**64
    if (priority := params.priority if body.priority is None else body.priority) is not None:
        common.priority = -priority  # elsewhere, as with vLLM, a lower number is served earlier
    common.cache_salt = body.cache_salt or ""
    add_extra_key(common, body.extra_key)
    if body.lora_path is not None:
        common.model = body.lora_path
    add_logit_bias(common, params.logit_bias)
    add_structured_output(common, params)
    add_beams(common, params)
    if params.suffix:
        common.suffix = params.suffix
    if body.return_logprob:
        common.logprobs = body.top_logprobs_num or 0
        if body.shows_prompt_logprobs:
            common.prompt_logprobs = body.top_logprobs_num or 0
    if params.echo:
        add_echo(common)
    elif params.hides_prompt:
        common.echo = True  # only with it may there be no tokens
    add_features(common, body)
    return common
