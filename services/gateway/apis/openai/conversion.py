"""Converts the bodies of completions, chats and /tokenize to gRPC messages."""

from __future__ import annotations

from services.common.errors import InvalidRequest
from services.gateway.apis.openai.chat_schema import ChatMessageObject, ChatRequest
from services.gateway.apis.openai.completion_schema import CompletionRequest
from services.gateway.apis.openai.fields import OpenAIFields
from services.gateway.apis.openai.token_answer_schema import TokenAnswerRequest
from services.gateway.apis.openai.token_schema import TemplateBody, TokenizeBody
from services.gateway.apis.openai.tool_schema import NamedToolChoice
from services.gateway.apis.shared.feature_fields import add_features
from services.gateway.apis.shared.to_message import (
    ALL,
    add_beams,
    add_echo,
    add_extra_key,
    add_logit_bias,
    add_structured_output,
    json_text,
    messages_of,
    sampling_message,
    thinking_variables,
)
from services.gateway.request.model_limits import LocalModel, ModelLimits
from services.gateway.request.read_request import check_token_ids
from services.gateway.request.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from services.gateway.text.chat_vectors import MAX_PLACES
from services.gateway.text.tools.tool import FUNCTION_PREFIX
from services.pb import gateway_pb2

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat may use the rest of the context


async def completion_messages(
    body: CompletionRequest, request_id: str, limits: ModelLimits
) -> list[gateway_pb2.GenerateRequest]:
    """One message per prompt, those of embeddings first; the ids of several prompts are numbered.

    Raises `InvalidRequest`, among others for more log-probabilities than an echoed prompt can have.
    """
    embeds = await _read_prompt_embeds(body, limits)
    common = _common_message(body, limits, defaults_for(body, limits.model))
    max_tokens = body.n_predict if body.max_tokens is None else body.max_tokens
    if max_tokens is None:
        common.default_max_tokens = DEFAULT_COMPLETION_TOKENS
    elif body.n_predict != ALL:  # else the rest of the context
        common.max_tokens = max_tokens
    if body.suffix:
        common.suffix = body.suffix
    if isinstance(body.decoder_prompt, str):
        common.decoder_prompt = body.decoder_prompt
    elif body.decoder_prompt is not None:
        check_token_ids("decoder_prompt", body.decoder_prompt, limits.vocab_size)
        common.decoder_prompt_token_ids.ids.extend(body.decoder_prompt)
    if body.logprobs is not None:
        common.logprobs = _count(body.logprobs, body, limits)
    if body.echo:
        add_echo(common)
    return messages_of(common, [*embeds, *body.prompts], request_id, limits)


def token_answer_message(
    body: TokenAnswerRequest, request_id: str, limits: ModelLimits
) -> gateway_pb2.GenerateRequest:
    """The message of a prompt of token ids."""
    given = body.sampling_params
    common = _common_message(given, limits)
    if body.model is not None:
        common.model = body.model
    if body.priority is not None:
        common.priority = body.priority
    if body.cache_salt is not None:
        common.cache_salt = body.cache_salt
    max_tokens = given.n_predict if given.max_tokens is None else given.max_tokens
    if max_tokens not in (None, ALL):
        common.max_tokens = max_tokens
    if given.logprobs is not None:
        common.logprobs = _count(given.logprobs, given, limits)
    [message] = messages_of(common, [body.token_ids], request_id, limits)
    return message


def chat_message(body: ChatRequest, request_id: str, limits: ModelLimits) -> gateway_pb2.GenerateRequest:
    """The message of a chat."""
    message = _common_message(body, limits, defaults_for(body, limits.model))
    message.request_id = request_id
    message.chat.CopyFrom(chat_of(body))
    message.return_progress = body.has_progress
    message.chat.tool_choice = choice_text(body.tool_choice)
    message.chat.reasoning_effort = body.reasoning_effort or ""
    if body.reasoning_effort == "none":
        variables = thinking_variables(False) | (body.chat_template_kwargs or {})
        message.chat.chat_template_kwargs = json_text(variables)
    message.chat.keeps_reasoning = body.keeps_reasoning
    budget = body.thinking_token_budget if body.max_reasoning_tokens is None else body.max_reasoning_tokens
    if budget not in (None, ALL):
        message.chat.max_reasoning_tokens = budget
    if body.parallel_tool_calls is not None:
        message.chat.parallel_tool_calls = body.parallel_tool_calls
    names = (body.max_completion_tokens, body.max_tokens, None if body.n_predict == ALL else body.n_predict)
    max_tokens = next((each for each in names if each is not None), None)
    if max_tokens is not None:
        message.max_tokens = max_tokens
    if body.logprobs:
        message.logprobs = _count(body.top_logprobs or 0, body, limits)
    return message


async def read_chat_embeds(body: ChatRequest, message: gateway_pb2.GenerateRequest, limits: ModelLimits) -> None:
    """Adds the vectors in the messages of `body` to the table of its `message`.

    Raises `InvalidRequest`, also if clients may send none.
    """
    reader = limits.model.prompt_embeds
    if reader is None:
        refuse_embeds(body, "gateway.enable_prompt_embeds is not set")
        return
    parts = [(i, position, data) for i, each in enumerate(body.messages) for position, data in each.embeds]
    if len(parts) > MAX_PLACES:
        raise InvalidRequest(
            f"the messages have {len(parts)} parts of prompt_embeds, at most {MAX_PLACES} allowed", "messages"
        )
    tables = []
    for i, position, data in parts:
        table = await reader.decode(data, f"messages[{i}]", limits.max_model_len)
        if tables and table.dtype != tables[0].dtype:
            raise InvalidRequest(
                f"messages[{i}] has prompt_embeds of {table.dtype}, those before it are of {tables[0].dtype}: all must "
                "have one dtype",
                f"messages[{i}]",
            )
        message.chat.messages[i].vectors.add(position=position, num_tokens=table.num_tokens)
        tables.append(table)
    if tables:
        whole = message.prompt_embedding_table
        whole.CopyFrom(tables[0])
        whole.values = b"".join(table.values for table in tables)
        whole.num_tokens = sum(table.num_tokens for table in tables)


def tokenize_messages(body: TokenizeBody) -> list[gateway_pb2.TokenizeRequest]:
    """One message per text, or one for the chat."""
    if body.content is not None:
        adds = next((given for given in (body.add_special, body.add_special_tokens) if given is not None), False)
        return [gateway_pb2.TokenizeRequest(text=body.content, add_special_tokens=adds)]
    if body.prompt is None:
        chat = chat_of(body)
        chat.tool_choice = choice_text(body.tool_choice) if body.tools else ""
        return [gateway_pb2.TokenizeRequest(chat=chat, add_special_tokens=body.add_special_tokens)]
    return text_messages(body.prompt, body.add_special_tokens)


def text_messages(given: str | list[str], add_special_tokens: bool | None) -> list[gateway_pb2.TokenizeRequest]:
    """One message per text."""
    texts = [given] if isinstance(given, str) else given
    return [gateway_pb2.TokenizeRequest(text=text, add_special_tokens=add_special_tokens) for text in texts]


def chat_of(body: ChatRequest | TokenizeBody | TemplateBody) -> gateway_pb2.Chat:
    """The chat part of a message."""
    return gateway_pb2.Chat(
        messages=[_message_of(each) for each in body.messages or ()],
        tools=json_text(body.tools),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template or "",
        chat_template_kwargs=json_text(body.chat_template_kwargs),
    )


def refuse_embeds(body: ChatRequest | TokenizeBody | TemplateBody, why: str) -> None:
    """Raises `InvalidRequest` if a message has vectors."""
    for i, each in enumerate(body.messages or ()):
        if each.embeds:
            raise InvalidRequest(f"messages[{i}] has prompt_embeds, which cannot be used here: {why}", f"messages[{i}]")


def _message_of(each: ChatMessageObject) -> gateway_pb2.ChatMessage:
    """Sets only what is given: a chat may have thousands of messages."""
    role = "system" if each.role == "developer" else each.role
    message = gateway_pb2.ChatMessage(role=role, content=each.text)
    if each.name:
        message.name = each.name
    for call in each.tool_calls or ():
        function = call.function
        message.tool_calls.add(id=call.id, name=function.name, arguments=function.arguments or "")
    if each.tool_call_id:
        message.tool_call_id = each.tool_call_id
    if reasoning := each.reasoning or each.reasoning_content:
        message.reasoning = reasoning
    if isinstance(each.content, list):
        for position, image in each.images:
            message.pictures.add(position=position, url=image.url, detail=image.detail)
    return message


def defaults_for(body: OpenAIFields, model: LocalModel) -> SamplingDefaults:
    """Of options that the body does not give."""
    return NO_DEFAULTS if body.use_beam_search else model.sampling_defaults  # a search samples nothing


def choice_text(choice: str | NamedToolChoice | None) -> str:
    """The choice as in `Chat.tool_choice` of gRPC."""
    if isinstance(choice, NamedToolChoice):
        return FUNCTION_PREFIX + choice.function.name
    return "required" if choice == "any" else choice or ""  # the former is Mistral's word


async def _read_prompt_embeds(body: CompletionRequest, limits: ModelLimits) -> list[gateway_pb2.PromptEmbeds]:
    """The prompts of vectors. Raises `InvalidRequest`, also if clients may send none."""
    texts, reader = body.embeds, limits.model.prompt_embeds
    if not texts:
        return []
    if reader is None:
        raise InvalidRequest("prompt_embeds is off here: gateway.enable_prompt_embeds is not set", "prompt_embeds")
    for field in ("echo", "prompt_logprobs"):
        if getattr(body, field) not in (None, False):
            raise InvalidRequest(f"{field} cannot be used with prompt_embeds, which are no tokens", field)
    is_list = isinstance(body.prompt_embeds, list)
    return [
        await reader.decode(text, f"prompt_embeds[{i}]" if is_list else "prompt_embeds", limits.max_model_len)
        for i, text in enumerate(texts)
    ]


def _count(num_logprobs: int, body: OpenAIFields, limits: ModelLimits) -> int:
    """The number of most likely tokens to report; as in vLLM, tokens that the request names take their place."""
    if body.logprob_token_ids:
        return 0
    return limits.vocab_size if num_logprobs == ALL else num_logprobs


def _common_message(
    body: OpenAIFields, limits: ModelLimits, defaults: SamplingDefaults = NO_DEFAULTS
) -> gateway_pb2.GenerateRequest:
    message = sampling_message(body, defaults)
    if body.model is not None:
        message.model = body.model
    add_logit_bias(message, body.logit_bias)
    add_extra_key(message, body.extra_key)
    add_features(message, body)
    message.only_last_hidden_state = message.return_hidden_states  # a choice has no other one
    message.sampling.logprob_token_ids.extend(body.logprob_token_ids or ())
    if body.prompt_logprobs is not None:
        message.prompt_logprobs = limits.vocab_size if body.prompt_logprobs == ALL else body.prompt_logprobs
    add_structured_output(message, body)
    add_beams(message, body)
    return message
