"""The models, by the names and types of their tensors: five of TensorRT-LLM's model repository, and one for vectors.

`ensemble` and `tensorrt_llm_bls` turn text into text. `preprocessing`, `tensorrt_llm` and `postprocessing` are its
three steps: text to token ids, token ids to token ids, and token ids to text. `embedding` makes vectors of texts or
token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import UnknownModel
from services.common.shorten import quote

VERSION = "1"  # of every model
# Clients of earlier versions send counts as UINT32. The first type is the one that the metadata names.
INT = ("INT32", "UINT32")
BOOL, FLOAT, TEXT, SEED = ("BOOL",), ("FP32",), ("BYTES",), ("UINT64", "INT64")
ONE, MANY = (1,), (-1,)
TABLE = ("FP32", "FP16", "BF16")
PIXELS = ("UINT8",)
PICTURES = (-1, -1, -1, 3)  # of one size
NOTHING: tuple[Any, ...] = (0, False, "", None)


@dataclass(frozen=True, slots=True)
class InputSpec:
    """An input tensor. Its first dimension, the batch, is not part of `dims`."""

    name: str
    datatypes: tuple[str, ...]
    dims: tuple[int, ...] = ONE  # -1: any size
    option: str = ""  # what it sets, the same for all models; by default its name
    is_required: bool = False
    only: tuple[Any, ...] | None = None  # the only accepted values, for options that are not supported; None: any

    @property
    def key(self) -> str:
        return self.option or self.name

    @property
    def is_scalar(self) -> bool:
        """Whether each row of the batch has one value."""
        return self.dims == ONE


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """An output tensor; `dims` without the batch."""

    name: str
    datatype: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as its metadata and configuration describe it."""

    name: str
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    platform: str
    is_decoupled: bool  # whether one request may get several responses
    refused: frozenset[str] = frozenset()  # inputs of the original that are not supported

    @property
    def inputs_by_name(self) -> Mapping[str, InputSpec]:
        return {each.name: each for each in self.inputs}

    def metadata(self) -> dict[str, Any]:
        """The model's metadata as in KServe's protocol, version 2."""
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": self.platform,
            "inputs": [
                {"name": each.name, "datatype": each.datatypes[0], "shape": [-1, *each.dims]} for each in self.inputs
            ],
            "outputs": [
                {"name": each.name, "datatype": each.datatype, "shape": [-1, *each.dims]} for each in self.outputs
            ],
        }

    def configuration(self, max_batch_size: int) -> dict[str, Any]:
        """The model's configuration, with the field names of Triton's `ModelConfig`.

        `max_batch_size` is the largest first dimension of an input.
        """
        return {
            "name": self.name,
            "platform": self.platform,
            "backend": "twostroke",
            "max_batch_size": max_batch_size,
            "version_policy": {"latest": {"num_versions": 1}},
            "input": [
                {
                    "name": each.name,
                    "data_type": _config_type(each.datatypes[0]),
                    "dims": list(each.dims),
                    "optional": not each.is_required,
                }
                for each in self.inputs
            ],
            "output": [
                {"name": each.name, "data_type": _config_type(each.datatype), "dims": list(each.dims)}
                for each in self.outputs
            ],
            "parameters": {"gpt_model_type": {"string_value": "inflight_fused_batching"}},
            "model_transaction_policy": {"decoupled": self.is_decoupled},
        }


def find_model(name: str, version: str) -> ModelSpec:
    """The model with this name; an empty version means the latest. Raises `UnknownModel`."""
    model = MODELS.get(name)
    if model is None:
        raise UnknownModel(f"unknown model {quote(name)}, there are {', '.join(MODELS)}", "model_name")
    if version not in ("", "-1", VERSION):
        raise UnknownModel(f"unknown version {quote(version)} of model {name!r}, there is {VERSION}", "model_version")
    return model


def _config_type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def _generation_inputs(names: Mapping[str, str]) -> Sequence[InputSpec]:
    """Inputs of all models that generate; `names` has the option's name in a model where it differs."""

    def spec(option: str, datatypes: tuple[str, ...], **properties: Any) -> InputSpec:
        return InputSpec(names.get(option, option), datatypes, option=option, **properties)

    return (
        spec("max_tokens", INT, is_required=True),
        spec("end_id", INT),
        spec("pad_id", INT),
        spec("top_k", INT),
        spec("top_p", FLOAT),
        spec("temperature", FLOAT),
        spec("repetition_penalty", FLOAT),
        spec("presence_penalty", FLOAT),
        spec("frequency_penalty", FLOAT),
        InputSpec("min_length", INT, option="min_tokens"),
        InputSpec("min_tokens", INT),
        InputSpec("random_seed", SEED, option="seed"),
        InputSpec("seed", SEED),
        spec("stream", BOOL),
        spec("num_return_sequences", INT),
        spec("exclude_input_in_output", BOOL),
        spec("return_log_probs", BOOL),
        spec("return_num_input_tokens", BOOL),
        spec("return_num_output_tokens", BOOL),
        spec("return_context_logits", BOOL),
        spec("return_generation_logits", BOOL),
        spec("return_perf_metrics", BOOL, only=NOTHING),
        spec("guided_decoding_guide_type", TEXT),
        spec("guided_decoding_guide", TEXT),
        InputSpec("lora_task_id", SEED),  # the adapter whose name is this number
        InputSpec("prompt_embedding_table", TABLE, (-1, -1)),
        InputSpec("prompt_vocab_size", INT),
        spec("beam_width", INT),
        # Only beam search reads these three.
        spec("length_penalty", FLOAT),
        spec("early_stopping", BOOL),
        spec("beam_search_diversity_rate", FLOAT, only=(0.0,)),
    )


_PICTURES = (InputSpec("image_bytes_input", PIXELS, PICTURES), InputSpec("image_url_input", TEXT, MANY))
_TEXT_INPUTS = (
    InputSpec("text_input", TEXT, is_required=True),
    InputSpec("bad_words", TEXT, MANY),
    InputSpec("stop_words", TEXT, MANY),
    *_generation_inputs({}),
    InputSpec("prompt_table_extra_id", SEED),
    *_PICTURES,
    InputSpec("num_draft_tokens", INT, only=(0,)),
    InputSpec("use_draft_logits", BOOL, only=NOTHING),
)
_COUNTS = (OutputSpec("num_input_tokens", "INT32", ONE), OutputSpec("num_output_tokens", "INT32", ONE))
_PROBABILITIES = (
    OutputSpec("cum_log_probs", "FP32", (-1,)),
    OutputSpec("output_log_probs", "FP32", (-1, -1)),
    OutputSpec("context_logits", "FP32", (-1, -1)),
    OutputSpec("generation_logits", "FP32", (-1, -1, -1)),
)
_INDEXES = (OutputSpec("batch_index", "INT32", ONE), OutputSpec("sequence_index", "INT32", ONE))
_TEXT_OUTPUTS = (OutputSpec("text_output", "BYTES", (-1,)), *_PROBABILITIES, *_INDEXES, *_COUNTS)
_REFUSED = frozenset({"lora_config", "lora_weights"})
_REFUSED_TEXTS = _REFUSED | {
    "decoder_text_input",
    "embedding_bias_weights",
    "embedding_bias_words",
    "image_input",
    "image_sizes_input",
    "video_bytes_input",
}

ENSEMBLE = ModelSpec("ensemble", _TEXT_INPUTS, _TEXT_OUTPUTS, "ensemble", True, _REFUSED_TEXTS)
TENSORRT_LLM_BLS = ModelSpec("tensorrt_llm_bls", _TEXT_INPUTS, _TEXT_OUTPUTS, "python", True, _REFUSED_TEXTS)
PREPROCESSING = ModelSpec(
    "preprocessing",
    (
        InputSpec("QUERY", TEXT, option="text_input", is_required=True),
        InputSpec("REQUEST_OUTPUT_LEN", INT, option="max_tokens", is_required=True),
        InputSpec("BAD_WORDS_DICT", TEXT, MANY, "bad_words"),
        InputSpec("STOP_WORDS_DICT", TEXT, MANY, "stop_words"),
        InputSpec("END_ID", INT, option="end_id"),
        InputSpec("PAD_ID", INT, option="pad_id"),
        InputSpec("IMAGE_BYTES", PIXELS, PICTURES, "image_bytes_input"),
        InputSpec("IMAGE_URL", TEXT, MANY, "image_url_input"),
    ),
    (
        OutputSpec("INPUT_ID", "INT32", (-1,)),
        OutputSpec("REQUEST_INPUT_LEN", "INT32", ONE),
        OutputSpec("BAD_WORDS_IDS", "INT32", (2, -1)),
        OutputSpec("STOP_WORDS_IDS", "INT32", (2, -1)),
        OutputSpec("REQUEST_OUTPUT_LEN", "INT32", ONE),
        OutputSpec("OUT_END_ID", "INT32", ONE),
        OutputSpec("OUT_PAD_ID", "INT32", ONE),
    ),
    "python",
    False,
    frozenset({"DECODER_QUERY", "EMBEDDING_BIAS_WEIGHTS", "EMBEDDING_BIAS_WORDS"})
    | {"IMAGES", "PROMPT_TABLE_EXTRA_ID", "VIDEO_BYTES"},
)
_RETENTION = ("starts", "ends", "priorities", "durations_ms")
TENSORRT_LLM = ModelSpec(
    "tensorrt_llm",
    (
        InputSpec("input_ids", ("INT32",), MANY, is_required=True),
        InputSpec("input_lengths", ("INT32",), is_required=True),
        InputSpec("bad_words_list", ("INT32",), (2, -1)),
        InputSpec("stop_words_list", ("INT32",), (2, -1)),
        InputSpec("stop", BOOL),
        InputSpec("prompt_table_extra_ids", SEED, MANY),
        *_PICTURES,  # which TensorRT-LLM has as a table of vectors
        *_generation_inputs(
            {
                "max_tokens": "request_output_len",
                "top_k": "runtime_top_k",
                "top_p": "runtime_top_p",
                "stream": "streaming",
                "length_penalty": "len_penalty",
            }
        ),
        InputSpec("runtime_top_p_decay", FLOAT, only=(1.0,)),
        InputSpec("runtime_top_p_min", FLOAT),  # only a decay would read it
        InputSpec("runtime_top_p_reset_ids", INT, only=(-1,)),
        # How long blocks stay in the cache, and how tokens are drafted: nothing of it is in an answer.
        *(InputSpec(f"retention_token_range_{name}", INT, MANY) for name in _RETENTION),
        InputSpec("retention_decode_priority", INT),
        InputSpec("retention_decode_duration_ms", INT),
        *(InputSpec(f"lookahead_{name}", INT) for name in ("window_size", "ngram_size", "verification_set_size")),
    ),
    (
        OutputSpec("output_ids", "INT32", (-1, -1)),
        OutputSpec("sequence_length", "INT32", (-1,)),
        *_PROBABILITIES,
        *_INDEXES,
        *_COUNTS,
    ),
    "tensorrt_llm",
    True,
    _REFUSED
    | {"decoder_input_ids", "draft_acceptance_threshold", "draft_input_ids", "draft_logits", "embedding_bias"}
    # of models with an encoder or images, and of a server that computes prompts elsewhere
    | {"context_phase_params", "cross_attention_mask", "decoder_input_lengths", "encoder_input_features"}
    | {"encoder_output_lengths", "mrope_position_deltas", "mrope_rotary_cos_sin", "skip_cross_attn_blocks"},
)
_PASSED_ON = {"CUM_LOG_PROBS": (-1,), "OUTPUT_LOG_PROBS": (-1, -1)}
POSTPROCESSING = ModelSpec(
    "postprocessing",
    (
        InputSpec("TOKENS_BATCH", ("INT32",), (-1, -1), is_required=True),
        InputSpec("SEQUENCE_LENGTH", ("INT32",), MANY),
        InputSpec("SKIP_SPECIAL_TOKENS", BOOL),
        *(InputSpec(name, FLOAT, dims) for name, dims in _PASSED_ON.items()),
    ),
    (
        OutputSpec("OUTPUT", "BYTES", (-1,)),
        *(OutputSpec(f"OUT_{name}", "FP32", dims) for name, dims in _PASSED_ON.items()),
    ),
    "python",
    False,
    frozenset({"BATCH_INDEX", "CONTEXT_LOGITS", "GENERATION_LOGITS", "SEQUENCE_INDEX"}),
)
EMBEDDING = ModelSpec(
    "embedding",
    (InputSpec("text_input", TEXT), InputSpec("input_ids", ("INT32",), MANY), InputSpec("input_lengths", ("INT32",))),
    (OutputSpec("embedding", "FP32", (-1,)),),
    "python",
    False,
)
MODELS: Mapping[str, ModelSpec] = {
    each.name: each for each in (ENSEMBLE, PREPROCESSING, TENSORRT_LLM, POSTPROCESSING, TENSORRT_LLM_BLS, EMBEDDING)
}
