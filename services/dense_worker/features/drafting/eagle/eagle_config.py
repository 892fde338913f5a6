"""`EagleConfig`: the config.json of an EAGLE-3 head, as SafeAILab's EAGLE, vLLM, SGLang and `speculators` write it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.common.errors import ModelError
from services.common.json_files.fields import Fields
from services.common.json_files.read_json import read_json
from services.common.model_config import ModelConfig, read_model_config

NUM_RESIDUALS = 3  # that the head joins
_LAYER = "transformer_layer_config"  # the layer's own fields, in files of `speculators`
_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_SPECULATORS = ("Eagle3Speculator", "Eagle3DraftModel")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_OPTIONS = {  # within `eagle_config`: values that describe what is computed here
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
# Fields of heads that compute something else.
_REFUSED = ("parallel_drafting", "norm_before_fc", "fc_norm", "norm_output", "quantization_config")


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """What config.json says of the head."""

    layer: ModelConfig  # a Llama of one layer, with the served model's sizes of hidden states and vocabulary
    draft_vocab_size: int
    residual_layers: tuple[int, int, int]  # the head reads the residual before each of these layers
    norm_before_residual: bool  # whether the layer adds to the normalised hidden state, not to the state itself


def read_eagle_config(path: Path, model: ModelConfig) -> EagleConfig:
    """Reads config.json in the directory `path`.

    Raises `ModelError`, naming value and limit, if it is not one of an EAGLE-3 head, if it is one for another model, or
    if the head computes what is not supported.
    """
    file = path / "config.json"
    values = read_json(file)
    if values is None:
        raise ModelError(f"{file} is missing")
    fields = Fields(values, str(file))
    is_speculator = _LAYER in values
    if is_speculator:
        fields.one_of("speculators_model_type", ("eagle3",))
    of_layer = fields.inner(_LAYER) if is_speculator else fields
    for each in {fields.where: fields, of_layer.where: of_layer}.values():
        each.refuse(*_REFUSED)
    _check_architecture(fields, _SPECULATORS if is_speculator else _ARCHITECTURES)
    of_layer.one_of("model_type", ("llama",), "llama")
    of_layer.one_of("num_hidden_layers", (1,))
    of_layer.refuse("attention_bias", "qkv_bias", "mlp_bias")
    raw = {name: value for name, value in of_layer.raw.items() if name != "architectures"} | {"model_type": "llama"}
    layer = read_model_config(raw, path)
    for name in ("hidden_size", "vocab_size"):
        if getattr(layer, name) != getattr(model, name):
            raise of_layer.error(name, getattr(layer, name), f"the model's is {getattr(model, name)}")
    if (target_size := fields.get("target_hidden_size", model.hidden_size)) != model.hidden_size:
        raise fields.error("target_hidden_size", target_size, f"the model's is {model.hidden_size}")
    draft_vocab_size = fields.get("draft_vocab_size", model.vocab_size)
    if type(draft_vocab_size) is not int or not 1 <= draft_vocab_size <= model.vocab_size:
        raise fields.error(
            "draft_vocab_size", draft_vocab_size, f"expected an integer from 1 to the vocabulary of {model.vocab_size}"
        )
    # What a file of `speculators` leaves out has had both meanings.
    has_norm = fields.one_of("norm_before_residual", (False, True), None if is_speculator else False)
    return EagleConfig(layer, draft_vocab_size, _read_residual_layers(fields, model.num_layers), has_norm)


def _check_architecture(fields: Fields, supported: tuple[str, ...]) -> None:
    architectures = fields.get("architectures", [supported[0]])
    if not isinstance(architectures, list) or not set(map(str, architectures)) <= set(supported):
        raise fields.unsupported("architectures", architectures, ", ".join(supported))


def _read_residual_layers(fields: Fields, num_layers: int) -> tuple[int, int, int]:
    """The layers before which the residuals are read; by default those of the paper's code."""
    name, found, offset = _LAYER_IDS, fields.get(_LAYER_IDS), 0
    if fields.get("eagle_config") is not None:
        inner = fields.inner("eagle_config")
        for option in inner.names():
            if option == _LAYER_IDS:
                # Here a number means the residual after that layer.
                if found is None and inner.get(option):
                    fields, found, offset = inner, inner.get(option), 1
            elif option not in _OPTIONS or inner.get(option) not in (None, _OPTIONS[option]):
                raise inner.unsupported(option, inner.get(option), f"{_OPTIONS.get(option, 'none')}")
    if not found:
        found = [2, num_layers // 2, num_layers - NUM_RESIDUALS]
    is_list = isinstance(found, list) and len(found) == NUM_RESIDUALS and all(type(each) is int for each in found)
    if not is_list or not all(0 <= each + offset < num_layers for each in found):
        most = num_layers - 1 - offset
        raise fields.error(name, found, f"expected {NUM_RESIDUALS} layers from {-offset} to {most} of {num_layers}")
    first, second, third = (each + offset for each in found)
    return first, second, third
