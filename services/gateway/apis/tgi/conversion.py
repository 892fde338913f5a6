"""Converts bodies of Text Generation Inference's routes to gRPC messages."""

from __future__ import annotations

from services.gateway.apis.shared.structured_output import StructuredOutputs, of_structured_outputs
from services.gateway.apis.shared.to_message import message_with, messages_of
from services.gateway.apis.tgi.schema import DEFAULT_TOKENS, GrammarObject, TgiRequest
from services.gateway.request.model_limits import ModelLimits
from services.pb import gateway_pb2

PARAM_NAMES = {
    "prompt": "inputs",
    "prompt_token_ids": "inputs",
    "logprobs": "parameters.top_n_tokens",
    "max_tokens": "parameters.max_new_tokens",
    "model": "parameters.adapter_id",
    "n": "parameters.best_of",
    "truncate_prompt_tokens": "parameters.truncate",
    **{
        name: f"parameters.{name}"
        for name in ("frequency_penalty", "repetition_penalty", "seed", "stop", "temperature", "top_k", "top_p")
    },
}


def tgi_messages(body: TgiRequest, request_id: str, limits: ModelLimits) -> list[gateway_pb2.GenerateRequest]:
    """One message. Raises `InvalidRequest`."""
    given = body.parameters
    message = message_with(
        n=given.best_of,
        temperature=given.temperature if given.samples else 0.0,
        top_k=given.top_k,
        top_p=given.top_p,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=given.repetition_penalty,
        seed=given.seed,
        stop=given.stop,
        include_stop_str_in_output=True,
        truncate_prompt_tokens=given.truncate,
    )
    message.max_tokens = DEFAULT_TOKENS if given.max_new_tokens is None else given.max_new_tokens
    if given.adapter_id is not None:
        message.model = given.adapter_id
    if given.grammar is not None and (form := of_structured_outputs(_form(given.grammar))) is not None:
        form.field_name = "parameters.grammar"
        message.sampling.structured_output.CopyFrom(form)
    if body.is_stream or given.details or given.decoder_input_details or (given.best_of or 1) > 1:
        message.logprobs = given.top_n_tokens or 0
    if given.decoder_input_details:
        message.prompt_logprobs = 0
    message.echo = bool(given.return_full_text)
    return messages_of(message, [body.inputs], request_id, limits)


def _form(grammar: GrammarObject) -> StructuredOutputs:
    if grammar.type == "regex":
        return StructuredOutputs(regex=grammar.value)
    schema = grammar.value["schema"] if grammar.type == "json_schema" else grammar.value  # type: ignore[index]
    return StructuredOutputs(json=schema)
