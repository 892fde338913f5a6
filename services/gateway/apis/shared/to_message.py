"""Converts HTTP bodies to gRPC messages, so that all limits are checked in one place, `gateway/request/`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from services.common.errors import InvalidRequest
from services.gateway.apis.openai.chat_schema import ChatMessageObject, ChatRequest
from services.gateway.apis.openai.completion_schema import CompletionRequest
from services.gateway.apis.openai.token_schema import TemplateBody, TokenizeBody
from services.gateway.apis.openai.tool_schema import choice_text
from services.gateway.apis.shared.generation_fields import GenerationFields
from services.gateway.apis.shared.structured_output import form_of
from services.gateway.request.generation_request import MAX_PROMPT_LOGPROBS, ModelLimits
from services.pb import gateway_pb2, sampling_pb2

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat may use the rest of the context
ALL = -1  # as in vLLM: the whole vocabulary, or as much of the prompt as fits
SAME_FIELDS = (
    "add_special_tokens",
    "best_of",
    "cache_salt",
    "ignore_eos",
    "include_stop_str_in_output",
    "model",
    "n",
    "priority",
    "skip_special_tokens",
    "user",
)
SAME_SAMPLING_FIELDS = (
    "frequency_penalty",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
)


def completion_messages(
    body: CompletionRequest, request_id: str, limits: ModelLimits, embeds: Sequence[gateway_pb2.PromptEmbeds] = ()
) -> list[gateway_pb2.GenerateRequest]:
    """One message per prompt, those of embeddings first; the ids of several prompts are numbered.

    Raises `InvalidRequest` for more log-probabilities than an echoed prompt can have.
    """
    common = _common_message(body, limits)
    if body.max_tokens is None:
        common.default_max_tokens = DEFAULT_COMPLETION_TOKENS
    else:
        common.max_tokens = body.max_tokens
    common.echo = bool(body.echo)
    if body.suffix:
        common.suffix = body.suffix
    if body.logprobs is not None:
        common.logprobs = _count(body.logprobs, body, limits)
        if body.echo and body.prompt_logprobs is None:
            if common.logprobs > MAX_PROMPT_LOGPROBS:
                message = f"logprobs is {common.logprobs}, with echo it must be from 0 to {MAX_PROMPT_LOGPROBS}"
                raise InvalidRequest(message, "logprobs")
            common.prompt_logprobs = common.logprobs
    messages = []
    prompts = [*embeds, *body.prompts]
    for i, prompt in enumerate(prompts):
        message = gateway_pb2.GenerateRequest()
        message.CopyFrom(common)
        message.request_id = request_id if len(prompts) == 1 else f"{request_id}-{i}"
        if isinstance(prompt, str):
            message.prompt = prompt
        elif isinstance(prompt, gateway_pb2.PromptEmbeds):
            message.prompt_embeds.CopyFrom(prompt)
        else:
            if body.truncate_prompt_tokens is not None:  # copy no more tokens than can be kept
                most = limits.max_model_len
                prompt = prompt[:most] if common.keep_first_tokens else prompt[-most:]
            message.prompt_token_ids.ids.extend(prompt)
        messages.append(message)
    return messages


def chat_message(body: ChatRequest, request_id: str, limits: ModelLimits) -> gateway_pb2.GenerateRequest:
    """The message of a chat."""
    message = _common_message(body, limits)
    message.request_id = request_id
    message.chat.CopyFrom(chat_of(body))
    message.return_progress = body.has_progress
    message.chat.tool_choice = choice_text(body.tool_choice)
    message.chat.reasoning_effort = body.reasoning_effort or ""
    budget = body.thinking_token_budget if body.max_reasoning_tokens is None else body.max_reasoning_tokens
    if budget not in (None, ALL):
        message.chat.max_reasoning_tokens = budget
    if body.parallel_tool_calls is not None:
        message.chat.parallel_tool_calls = body.parallel_tool_calls
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is not None:
        message.max_tokens = max_tokens
    if body.logprobs:
        message.logprobs = _count(body.top_logprobs or 0, body, limits)
    return message


def tokenize_messages(body: TokenizeBody) -> list[gateway_pb2.TokenizeRequest]:
    """One message per text, or one for the chat."""
    if body.content is not None:
        adds = next((given for given in (body.add_special, body.add_special_tokens) if given is not None), False)
        return [gateway_pb2.TokenizeRequest(text=body.content, add_special_tokens=adds)]
    if body.prompt is None:
        return [gateway_pb2.TokenizeRequest(chat=chat_of(body), add_special_tokens=body.add_special_tokens)]
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    return [gateway_pb2.TokenizeRequest(text=text, add_special_tokens=body.add_special_tokens) for text in texts]


def chat_of(body: ChatRequest | TokenizeBody | TemplateBody) -> gateway_pb2.Chat:
    """The chat part of a message."""
    return gateway_pb2.Chat(
        messages=[_message_of(each) for each in body.messages or ()],
        tools=to_json(body.tools).decode() if body.tools else "",
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template or "",
        chat_template_kwargs=to_json(body.chat_template_kwargs).decode() if body.chat_template_kwargs else "",
    )


def refuse_embeds(body: ChatRequest | TokenizeBody | TemplateBody, why: str) -> None:
    """Raises `InvalidRequest` if a message has vectors."""
    for i, each in enumerate(body.messages or ()):
        if each.embeds:
            raise InvalidRequest(f"messages[{i}] has prompt_embeds, which cannot be used here: {why}", f"messages[{i}]")


def _message_of(each: ChatMessageObject) -> gateway_pb2.ChatMessage:
    return gateway_pb2.ChatMessage(
        role="system" if each.role == "developer" else each.role,
        content=each.text,
        name=each.name or "",
        tool_calls=[
            gateway_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments or "")
            for call in each.tool_calls or ()
        ],
        tool_call_id=each.tool_call_id or "",
        reasoning=each.reasoning or each.reasoning_content or "",
    )


def _count(num_logprobs: int, body: GenerationFields, limits: ModelLimits) -> int:
    """The number of most likely tokens to report; as in vLLM, tokens that the request names take their place."""
    if body.logprob_token_ids:
        return 0
    return limits.vocab_size if num_logprobs == ALL else num_logprobs


def _common_message(body: GenerationFields, limits: ModelLimits) -> gateway_pb2.GenerateRequest:
    sampling = _given(body, SAME_SAMPLING_FIELDS)
    if body.top_k is not None and body.top_k not in (0, -1):
        sampling["top_k"] = body.top_k
    if body.seed is not None:
        sampling["seed"] = body.seed % 2**64
    if body.logit_bias:
        sampling["logit_bias"] = {int(token_id): bias for token_id, bias in body.logit_bias.items()}
    if body.allowed_token_ids:
        sampling["allowed_token_ids"] = body.allowed_token_ids
    if body.logprob_token_ids:
        sampling["logprob_token_ids"] = body.logprob_token_ids
    if (form := form_of(body)) is not None:
        sampling["structured_output"] = form
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    return gateway_pb2.GenerateRequest(
        sampling=sampling_pb2.SamplingParams(**sampling),
        stop=stop,
        stop_token_ids=body.stop_token_ids,
        bad_words=body.bad_words,
        truncate_prompt_tokens=0 if body.truncate_prompt_tokens == ALL else body.truncate_prompt_tokens,
        keep_first_tokens=body.truncation_side == "right",
        prompt_logprobs=limits.vocab_size if body.prompt_logprobs == ALL else body.prompt_logprobs,
        beam_search=_beam_search_of(body),
        **_given(body, SAME_FIELDS),
    )


def _beam_search_of(body: GenerationFields) -> sampling_pb2.BeamSearch | None:
    if not body.use_beam_search:
        return None
    stopping = {
        "never": sampling_pb2.EARLY_STOPPING_NEVER,
        True: sampling_pb2.EARLY_STOPPING_ALWAYS,
    }.get(body.early_stopping, sampling_pb2.EARLY_STOPPING_HEURISTIC)
    return sampling_pb2.BeamSearch(length_penalty=body.length_penalty, early_stopping=stopping)


def _given(body: GenerationFields, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(body, name)) is not None}
