"""Converts bodies of llama.cpp's /completion to gRPC messages."""

from __future__ import annotations

import secrets
from collections import defaultdict

from services.common.errors import InvalidRequest
from services.common.sampling_params import MAX_LOGIT_BIAS
from services.gateway.apis.llama_cpp.adapters import named_adapter
from services.gateway.apis.llama_cpp.schema import ALL, InfillBody, LlamaCppBody
from services.gateway.apis.shared.prompts import MEDIA_MARKER, MediaPrompt
from services.gateway.apis.shared.to_message import add_structured_output, messages_of, sampling_message
from services.gateway.request.mixed_prompt import without_texts_between
from services.gateway.request.model_limits import ModelLimits, ModelNames
from services.gateway.request.read_request import check_token_ids
from services.gateway.text.tokenizer import Tokenizer
from services.pb import gateway_pb2, sampling_pb2


async def llama_cpp_messages(
    body: LlamaCppBody, request_id: str, limits: ModelLimits, names: ModelNames
) -> list[gateway_pb2.GenerateRequest]:
    """One message per prompt; `names`: those that the caller may use. Raises `InvalidRequest`."""
    adapter = None if body.lora is None else named_adapter(body.lora, names)
    if body.lora is not None and body.model in names.adapters and body.model != adapter:
        raise InvalidRequest(f"lora does not name the adapter {body.model!r}, which model names", "lora")
    model, most, adds = limits.model, limits.max_prompt_len, body.add_special_tokens
    given = body.prompts_given
    texts = [_marked(each, model.tokenizer) if isinstance(each, MediaPrompt) else each for each in given]
    prompts = [await without_texts_between(each, model, most, "prompt", adds) for each in texts]
    common = _common_message(body.resolved, limits)
    if adapter is not None:
        common.model = adapter
    messages = messages_of(common, prompts, request_id, limits)
    bias, banned = await _read_biases(body, model.tokenizer, limits.vocab_size)
    if body.ignore_eos:  # as there, it is never sampled
        banned |= set(model.eos_token_ids)
    for prompt, message in zip(given, messages, strict=True):
        if isinstance(prompt, MediaPrompt):
            for data in prompt.multimodal_data:
                message.pictures.add(url=f"data:;base64,{data}")
        if isinstance(body, InfillBody):
            message.suffix, message.middle, message.echo = body.input_suffix, body.prompt or "", False
            for each in body.input_extra or ():
                message.excerpts.add(filename=each.filename, text=each.text)
        if body.cache_prompt is False:
            message.cache_salt = secrets.token_hex(16)  # no other prompt has the same
        message.return_progress = bool(body.return_progress and body.stream)
        sampling = message.sampling
        sampling.logit_bias.update(bias)
        if body.post_sampling_probs:
            sampling.sampled_logprobs = True
        sampling.bad_words.extend(sampling_pb2.TokenSequence(token_ids=[token_id]) for token_id in banned)
    return messages


def _marked(prompt: MediaPrompt, tokenizer: Tokenizer) -> str:
    """The text with the model's own mark of a picture in place of llama.cpp's."""
    return prompt.prompt_string.replace(MEDIA_MARKER, tokenizer.picture_marker or MEDIA_MARKER)


def _common_message(used: LlamaCppBody, limits: ModelLimits) -> gateway_pb2.GenerateRequest:
    """Everything but the prompt and `logit_bias` of a request with all defaults."""
    message = sampling_message(used)
    if used.model is not None:
        message.model = used.model
    add_structured_output(message, used)
    if used.suffix:
        message.suffix = used.suffix
    if used.logprobs is not None:
        message.logprobs = limits.vocab_size if used.logprobs == ALL else used.logprobs
    if used.max_tokens is not None:  # else the rest of the context
        message.max_tokens = used.max_tokens
    message.echo = used.max_tokens == 0  # only then may there be no tokens
    return message


async def _read_biases(
    body: LlamaCppBody, tokenizer: Tokenizer, vocab_size: int
) -> tuple[dict[int, float], set[int]]:
    """What is added to the logits of tokens, and the tokens that are never sampled."""
    bias, banned = defaultdict[int, float](float), set[int]()
    for token, value in body.biases:
        token_ids = [token] if isinstance(token, int) else await tokenizer.encode(token, add_special_tokens=False)
        check_token_ids("logit_bias", token_ids, vocab_size)
        for token_id in token_ids:
            if value is None:
                banned.add(token_id)
            else:
                bias[token_id] += value
    limited = {each: max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, value)) for each, value in bias.items()}
    return {each: value for each, value in limited.items() if each not in banned}, banned
