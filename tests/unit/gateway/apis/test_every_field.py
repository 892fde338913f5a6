"""Every field of the request types of the installed `openai` package, and every field that docs/api.md promises.

Each is served, refused by name, or in a list of fields that cannot change an answer. A version of the package with a
new field fails here, until the field is one of the three. SGLang's and llama.cpp's fields are those that their pages
list, and what else changes an answer; Triton's are the inputs in the configurations of TensorRT-LLM's models.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import httpx2
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from services.gateway.apis.llama_cpp.schema import InfillBody, LlamaCppBody
from services.gateway.apis.openai.chat_schema import ChatRequest
from services.gateway.apis.openai.completion_schema import CompletionRequest
from services.gateway.apis.responses.schema import ResponsesRequest
from services.gateway.apis.sglang.schema import GenerateBody, GenerateSampling
from services.gateway.apis.shared.generation_fields import IGNORED
from services.gateway.apis.shared.request_model import RequestModel
from services.gateway.apis.triton.models import MODELS
from tests.support.clients.http_gateway import say, with_client
from tests.support.cluster import REPOSITORY
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

API = (REPOSITORY / "docs" / "api.md").read_text()
TRITON = (REPOSITORY / "docs" / "triton.md").read_text()
# Who asks, for how much money, what is stored at OpenAI and how its caches are paid: nothing of it is in an answer.
WITHOUT_EFFECT = {
    *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
    *("service_tier", "store", "verbosity"),
}
HI: Any = [{"role": "user", "content": "Hi"}]
TYPES: list[tuple[str, Any, type[RequestModel], set[str], dict[str, Any]]] = [
    ("/v1/chat/completions", chat_create_params.CompletionCreateParamsStreaming, ChatRequest, WITHOUT_EFFECT,
     {"messages": HI, "max_tokens": 1}),
    ("/v1/completions", completion_create_params.CompletionCreateParamsStreaming, CompletionRequest, set(),
     {"prompt": "a", "max_tokens": 1}),
    ("/v1/responses", response_create_params.ResponseCreateParamsStreaming, ResponsesRequest,
     WITHOUT_EFFECT - {"metadata", "store", "verbosity"} | {"access_programs", "max_tool_calls"},
     {"input": "a", "max_output_tokens": 1}),
]  # fmt: skip


def served(model: type[RequestModel]) -> set[str]:
    """The fields that do what they promise."""
    fields = {field.alias or name: field.description or "" for name, field in model.model_fields.items()}
    return {name for name, text in fields.items() if text != IGNORED and not text.startswith(f"{IGNORED}:")}


@pytest.mark.parametrize(("path", "given", "model", "ignored", "body"), TYPES, ids=[each[0] for each in TYPES])
def test_every_field_of_openai_is_served_refused_or_without_effect(
    path: str, given: Any, model: type[RequestModel], ignored: set[str], body: dict[str, Any], tmp_path: Path
) -> None:
    names = set(get_type_hints(given, include_extras=True))
    assert names - served(model) - model.unsupported.keys() == ignored & names
    assert ignored <= model.model_fields.keys() | names and not ignored & served(model)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for name in names & model.unsupported.keys():
            answer = await client.post(path, json=body | {name: {"anything": 1}})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == name, (name, error)
            assert (await client.post(path, json=body | {name: None})).status_code == 200, name

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_every_field_that_the_page_promises_is_served() -> None:
    both, rest = API[API.index("## Fields beyond OpenAI's") :].split("Chats only:", 1)
    of_chats = rest[: rest.index("\n`/tokenize`")]
    for text, models in ((both, (ChatRequest, CompletionRequest)), (of_chats, (ChatRequest,))):
        rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
        names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
        assert len(names) > 5
        for model in models:
            assert set(names) <= served(model), (model, set(names) - served(model))
    for section, model in (("/generate", GenerateSampling), ("/completion", LlamaCppBody)):
        text = API[API.index(f"## {section}\n") :].split("\n## ", 2)[0]
        own = {"/generate": ("max_new_tokens", "min_new_tokens", "no_stop_trim", "sampling_seed")}.get(
            section, ("n_predict", "n_cmpl", "n_probs", "logit_bias", "cache_prompt", "response_fields")
        )
        assert all(f"`{name}" in text for name in own) and set(own) <= served(model)


SGLANG = {
    *("text", "input_ids", "input_embeds", "image_data", "audio_data", "video_data", "sampling_params", "rid"),
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs"),
    *("stream", "lora_path", "custom_logit_processor", "return_hidden_states", "session_params", "modalities"),
    *("priority", "cache_salt", "positional_embed_overrides", "lora_id", "max_thinking_tokens", "require_reasoning"),
    *("return_bytes", "return_entropy", "return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64"),
    *("return_indexer_topk", "return_prompt_token_ids", "return_routed_experts", "return_sampling_mask"),
    *("multi_item_delimiter_indices", "log_metrics", "no_logs", "custom_labels", "conversation_id", "session_id"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "routed_dp_rank", "routing_key"),
}
SGLANG_SAMPLING = {
    *("max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k"),
    *("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "json_schema", "regex", "ebnf"),
    *("structural_tag", "n", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
    *("custom_params", "logit_bias", "sampling_seed", "stream_interval"),
}
LLAMA_CPP = {
    *("prompt", "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "n_predict"),
    *("n_indent", "n_keep", "n_cmpl", "n_cache_reuse", "stream", "stop", "typical_p", "repeat_penalty"),
    *("repeat_last_n", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length"),
    *("dry_penalty_last_n", "dry_sequence_breakers", "xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau"),
    *("mirostat_eta", "adaptive_target", "adaptive_decay", "grammar", "grammar_lazy", "grammar_triggers"),
    *("json_schema", "seed", "ignore_eos", "logit_bias", "n_probs", "min_keep", "t_max_predict_ms", "id_slot"),
    *("cache_prompt", "return_tokens", "samplers", "timings_per_token", "return_progress", "sse_ping_interval"),
    *("post_sampling_probs", "response_fields", "lora", "top_n_sigma", "tfs_z", "image_data", "system_prompt"),
}
OTHERS: list[tuple[str, str, set[str], type[RequestModel]]] = [
    ("/generate", "/generate", SGLANG, GenerateBody),
    ("/generate", "/generate", SGLANG_SAMPLING, GenerateSampling),
    ("/completion", "/completion", LLAMA_CPP, LlamaCppBody),
    ("/infill", "/completion", LLAMA_CPP | {"input_prefix", "input_suffix", "input_extra"}, InfillBody),
]
ANY = [[{"of": "any"}]]  # a value that no field may have


def without_effect(text: str) -> set[str]:
    """The names in the sentence "Without effect" of a page."""
    [sentence] = re.findall(r"ithout effect: (.*?)[.]\s", text, re.DOTALL)
    return set(re.findall(r"`(\w+)`", sentence))


@pytest.mark.parametrize(("path", "section", "names", "model"), OTHERS, ids=[each[3].__name__ for each in OTHERS])
def test_every_field_of_sglang_and_llama_cpp_is_served_refused_or_without_effect(
    path: str, section: str, names: set[str], model: type[RequestModel], tmp_path: Path
) -> None:
    ignored = without_effect(API[API.index(f"## {section}\n") :].split("\n## ", 2)[0])
    assert names - served(model) - model.unsupported.keys() == ignored & names
    assert not ignored & names & (served(model) | model.unsupported.keys())
    sampling: dict[str, Any] = {"max_new_tokens": 1}
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": "a", "sampling_params": sampling},
        "/completion": {"prompt": "a", "n_predict": 1},
        "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 1},
    }
    body = bodies[path]

    def with_field(name: str, value: Any) -> dict[str, Any]:
        is_inner = model is GenerateSampling
        return body | ({"sampling_params": sampling | {name: value}} if is_inner else {name: value})

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for name in sorted(names - ignored):  # those that are served are not ignored: they refuse the value
            answer = await client.post(path, json=with_field(name, ANY))
            assert answer.status_code == 400 and name in answer.text, (name, answer.text)
        if path != "/infill":  # its model has no tokens for it
            for name in sorted(names & ignored):
                answer = await client.post(path, json=with_field(name, ANY))
                assert answer.status_code == 200, (name, answer.text)

    with_client(tmp_path, FakeDense(say(" one")), test)


TEXT_INPUTS = {
    *("text_input", "decoder_text_input", "image_input", "image_bytes_input", "image_sizes_input"),
    *("image_url_input", "video_bytes_input"),
    *("max_tokens", "bad_words", "stop_words", "exclude_input_in_output", "end_id", "pad_id", "top_k", "top_p"),
    *("temperature", "length_penalty", "repetition_penalty", "min_tokens", "min_length", "presence_penalty"),
    *("frequency_penalty", "seed", "random_seed", "return_log_probs", "return_context_logits", "early_stopping"),
    *("return_generation_logits", "num_return_sequences", "beam_width", "beam_search_diversity_rate", "stream"),
    *("prompt_embedding_table", "prompt_vocab_size", "prompt_table_extra_id", "embedding_bias_words"),
    *("embedding_bias_weights", "num_draft_tokens", "use_draft_logits", "lora_task_id", "lora_weights"),
    *("lora_config", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"),
    *("guided_decoding_guide_type", "guided_decoding_guide"),
}
INPUTS = {
    "ensemble": TEXT_INPUTS,
    "tensorrt_llm_bls": TEXT_INPUTS,
    "preprocessing": {
        *("QUERY", "DECODER_QUERY", "IMAGE_BYTES", "IMAGE_URL", "IMAGES", "VIDEO_BYTES", "REQUEST_OUTPUT_LEN"),
        *("BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS", "END_ID", "PAD_ID"),
        "PROMPT_TABLE_EXTRA_ID",
    },
    "tensorrt_llm": {
        *("input_ids", "encoder_input_features", "encoder_output_lengths", "input_lengths", "request_output_len"),
        *("num_return_sequences", "draft_input_ids", "decoder_input_ids", "decoder_input_lengths", "draft_logits"),
        *("draft_acceptance_threshold", "end_id", "pad_id", "stop_words_list", "bad_words_list", "embedding_bias"),
        *("beam_width", "temperature", "runtime_top_k", "runtime_top_p", "runtime_top_p_min", "runtime_top_p_decay"),
        *("runtime_top_p_reset_ids", "len_penalty", "early_stopping", "repetition_penalty", "min_tokens", "min_length"),
        *("beam_search_diversity_rate", "presence_penalty", "frequency_penalty", "seed", "random_seed"),
        *("return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics"),
        *("return_num_input_tokens", "return_num_output_tokens", "exclude_input_in_output", "stop", "streaming"),
        *("prompt_embedding_table", "prompt_table_extra_ids", "prompt_vocab_size", "cross_attention_mask"),
        *("image_bytes_input", "image_url_input"),  # of this server
        *("mrope_rotary_cos_sin", "mrope_position_deltas", "lora_task_id", "lora_weights", "lora_config"),
        *("context_phase_params", "skip_cross_attn_blocks", "retention_token_range_starts"),
        *("retention_token_range_ends", "retention_token_range_priorities", "retention_token_range_durations_ms"),
        *("retention_decode_priority", "retention_decode_duration_ms", "guided_decoding_guide_type"),
        *("guided_decoding_guide", "lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"),
    },
    "postprocessing": {
        *("TOKENS_BATCH", "SEQUENCE_LENGTH", "CUM_LOG_PROBS", "OUTPUT_LOG_PROBS", "CONTEXT_LOGITS"),
        *("GENERATION_LOGITS", "BATCH_INDEX", "SEQUENCE_INDEX", "SKIP_SPECIAL_TOKENS"),
    },
}
# Of a request; the others are of its inputs and outputs.
PARAMETERS = {"sequence_id": 7, "sequence_start": True, "sequence_end": True, "priority": 1, "timeout": 1}
FINAL = {"triton_enable_empty_final_response": True}


def test_every_input_of_tritons_models_is_served_or_refused(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for model, names in INPUTS.items():
            spec = MODELS[model]
            assert names == spec.inputs_by_name.keys() | spec.refused, model
            for name in sorted(spec.refused):
                body = {"text_input": "a", "max_tokens": 1, name: [1]}
                for route in ("generate", "generate_stream"):
                    answer = await client.post(f"/v2/models/{model}/{route}", json=body)
                    assert answer.status_code == 400 and name in answer.text, (model, name, answer.text)
                tensor = {"name": name, "datatype": "INT32", "shape": [1, 1], "data": [1]}
                answer = await client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]})
                assert answer.status_code == 400 and name in answer.text, (model, name, answer.text)

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_the_inputs_and_parameters_without_effect_are_those_of_the_page(tmp_path: Path) -> None:
    [sentence] = re.findall(r"without effect: (.*?)[.]\n", TRITON, re.DOTALL)
    names = set(re.findall(r"`(\w+)`", sentence)) - {"tensorrt_llm"}
    assert names == PARAMETERS.keys() | FINAL.keys()
    hints = {name for name in INPUTS["tensorrt_llm"] if name.startswith(("retention_", "lookahead_"))}
    assert len(hints) == 9 and "`retention_...`" in sentence and "`lookahead_...`" in sentence
    given = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 1}
    tensors = [
        {"name": name, "datatype": "INT32", "shape": [1, len(data)], "data": data}
        for name, data in (("input_ids", [5, 6]), ("input_lengths", [2]), ("request_output_len", [1]))
    ]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        path = "/v2/models/tensorrt_llm"
        plain = (await client.post(f"{path}/generate", json=given)).json()
        hinted = await client.post(f"{path}/generate", json=given | dict.fromkeys(hints, 1))
        assert hinted.status_code == 200 and hinted.json() == plain
        plain = (await client.post(f"{path}/infer", json={"inputs": tensors})).json()
        more = [{"name": name, "datatype": "INT32", "shape": [1, 1], "data": [1]} for name in sorted(hints)]
        body = {"inputs": tensors + more, "parameters": PARAMETERS | FINAL}
        hinted = await client.post(f"{path}/infer", json=body)
        assert hinted.status_code == 200 and hinted.json() == plain
        assert [len(submit.spec.prompt_token_ids) for submit in dense.submits] == [2] * 4

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)
