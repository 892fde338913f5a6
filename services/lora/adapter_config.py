"""`AdapterConfig`: PEFT's adapter_config.json, read by PEFT's rules. What is more than LoRA is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from services.common.errors import InvalidRequest
from services.common.json_files.patterns import PatternError, PatternMatcher
from services.common.shorten import show

# Kinds of adapters that consist of virtual tokens. P-tuning (arXiv:2103.10385) stores the output of its encoder.
PROMPT_TUNING = ("PROMPT_TUNING", "P_TUNING")
MAX_NAMES = 4096  # in a list, such as target_modules
MAX_PATTERNS = 1024  # in rank_pattern and in alpha_pattern
MAX_MATCHING_S = 5.0  # for all patterns of an adapter together
# Settings with which an adapter is more than A and B of linear layers, or belongs to another base model.
REFUSED = (
    "alora_invocation_tokens",
    "arrow_config",
    "corda_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "lora_ga_config",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
# Ways to initialise an adapter that also change the weights of the base model.
CHANGING_INITS = ("corda", "loftq", "lora_ga", "olora", "pissa")
_NAME = re.compile(r"[\w.]+")
_LAYER_INDEX = re.compile(r".*?\.[^.]*\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """The settings of one linear layer."""

    rank: int
    scale: float  # of B A: lora_alpha / rank, or with rsLoRA lora_alpha / sqrt(rank) (arXiv:2312.03732)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings of an adapter; `modules` finds those of each linear layer of a model."""

    rank: int
    alpha: float
    use_rslora: bool
    target_modules: str | tuple[str, ...]  # "all-linear", a pattern of whole names, or ends of names
    exclude_modules: str | tuple[str, ...]
    layer_indexes: tuple[int, ...]  # empty: all
    layers_patterns: tuple[str, ...]  # what precedes the index of a layer; empty: anything
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def modules(self, names: Iterable[str]) -> dict[str, LayerSettings]:
        """The targeted ones of a model's linear layers with their settings.

        Raises `InvalidRequest` if the patterns of the config are not valid or take too long.
        """
        matcher = _Matcher()
        found = {}
        for name in names:
            if self._is_target(name, matcher):
                rank_key = matcher.first_key(self.rank_pattern, name)
                alpha_key = matcher.first_key(self.alpha_pattern, name)
                rank = self.rank if rank_key is None else self.rank_pattern[rank_key]
                alpha = self.alpha if alpha_key is None else self.alpha_pattern[alpha_key]
                found[name] = LayerSettings(rank, alpha / (math.sqrt(rank) if self.use_rslora else rank))
        return found

    def _is_target(self, name: str, matcher: _Matcher) -> bool:
        if matcher.matches(self.exclude_modules, name):
            return False
        if self.target_modules == "all-linear":
            return True
        if not matcher.matches(self.target_modules, name):
            return False
        if isinstance(self.target_modules, str) or not self.layer_indexes:
            return True
        return matcher.layer_index(self.layers_patterns, name) in self.layer_indexes


def read_object(text: bytes) -> dict[str, Any]:
    """The object in adapter_config.json. Raises `InvalidRequest` if its text is anything else."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"adapter_config.json is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidRequest(f"adapter_config.json holds a JSON {type(raw).__name__}, expected an object")
    return raw


def parse_adapter_config(text: bytes, max_rank: int) -> AdapterConfig:
    """The config of a file's text. Raises `InvalidRequest`, naming the setting that is wrong or not supported."""
    raw = read_object(text)
    if raw.get("peft_type") != "LORA":
        supported = ", ".join(map(repr, ("LORA", *PROMPT_TUNING)))
        raise InvalidRequest(f"adapter_config.json has peft_type {show(raw.get('peft_type'))}, supported: {supported}")
    for name in REFUSED:
        if raw.get(name):
            raise InvalidRequest(f"adapter_config.json has {name} {show(raw[name])}, which is not supported")
    if raw.get("bias", "none") != "none":
        raise InvalidRequest(f"adapter_config.json has bias {show(raw['bias'])}, supported: 'none'")
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(CHANGING_INITS):
        raise InvalidRequest(
            f"adapter_config.json has init_lora_weights {show(init)}, which changes the base model's weights, too"
        )
    target_modules = _read_names(raw, "target_modules")
    if not target_modules:
        raise InvalidRequest("adapter_config.json has no target_modules")
    for key in target_modules if isinstance(target_modules, tuple) else ():
        if key.split(".")[-1] in ("lm_head", "embed_tokens"):
            raise InvalidRequest(f"adapter_config.json targets {show(key)}, which adapters cannot change here")
    layer_indexes = raw.get("layers_to_transform") or ()
    if isinstance(layer_indexes, int):
        layer_indexes = (layer_indexes,)
    if not isinstance(layer_indexes, list | tuple) or not all(type(each) is int for each in layer_indexes):
        raise InvalidRequest(f"adapter_config.json has layers_to_transform {show(layer_indexes)}, expected integers")
    _check_length("layers_to_transform", layer_indexes)
    layers_pattern = _read_names(raw, "layers_pattern") or ()
    return AdapterConfig(
        rank=_read_rank("r", raw.get("r", 8), max_rank),
        alpha=_read_number("lora_alpha", raw.get("lora_alpha", 8)),
        use_rslora=bool(raw.get("use_rslora")),
        target_modules=target_modules,
        exclude_modules=_read_names(raw, "exclude_modules"),
        layer_indexes=tuple(layer_indexes),
        layers_patterns=layers_pattern if isinstance(layers_pattern, tuple) else (layers_pattern,),
        rank_pattern={key: _read_rank(key, value, max_rank) for key, value in _read_pattern(raw, "rank_pattern")},
        alpha_pattern={key: _read_number(key, value) for key, value in _read_pattern(raw, "alpha_pattern")},
    )


class _Matcher:
    """Applies PEFT's patterns of module names, for at most `MAX_MATCHING_S` in all."""

    def __init__(self) -> None:
        self._patterns = PatternMatcher(MAX_MATCHING_S)
        self._ends: dict[str, str] = {}  # with which a name must end to match a key: the patterns are slower

    def matches(self, wanted: str | tuple[str, ...], name: str) -> bool:
        """Whether a pattern matches a whole name, or one of several names is its end."""
        if isinstance(wanted, str):
            return bool(wanted) and self._match(rf"(?:{wanted})\Z", name) is not None
        return any(name == each or name.endswith(f".{each}") for each in wanted)

    def first_key(self, patterns: Mapping[str, Any], name: str) -> str | None:
        """The first key of rank_pattern or alpha_pattern that matches the end of a name."""
        for key in patterns:
            end = self._ends.get(key)
            if end is None:
                end = self._ends[key] = key.rpartition(".")[2] if _NAME.fullmatch(key) else ""
            if name.endswith(end) and self._match(rf"(.*\.)?({key})$", name) is not None:
                return key
        return None

    def layer_index(self, patterns: tuple[str, ...], name: str) -> int | None:
        """The number of a module's layer, after one of `patterns` or, without any, the first number."""
        for pattern in patterns:
            found = self._match(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.", name)
            if found is not None:
                return int(found["idx"])
        found = None if patterns else _LAYER_INDEX.match(name)
        return None if found is None else int(found[1])

    def _match(self, pattern: str, name: str) -> regex.Match[str] | None:
        try:
            return self._patterns.match(pattern, name)
        except PatternError as error:
            raise InvalidRequest(f"adapter_config.json: {error}") from error


def _read_names(raw: dict[str, Any], field: str) -> str | tuple[str, ...]:
    value = raw.get(field)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidRequest(f"adapter_config.json has {field} {show(value)}, expected a string or a list of strings")
    _check_length(field, value)
    return tuple(value)


def _check_length(field: str, values: Collection[object]) -> None:
    if len(values) > MAX_NAMES:
        raise InvalidRequest(f"adapter_config.json has {field} with {len(values)} entries, at most {MAX_NAMES} allowed")


def _read_pattern(raw: dict[str, Any], field: str) -> Iterable[tuple[str, Any]]:
    value = raw.get(field) or {}
    if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
        raise InvalidRequest(
            f"adapter_config.json has {field} {show(value)}, expected an object with at most {MAX_PATTERNS} keys"
        )
    return value.items()


def _read_rank(name: str, value: Any, max_rank: int) -> int:
    if type(value) is not int or value < 1:
        raise InvalidRequest(f"adapter_config.json has {name} {show(value)}, expected a whole number of at least 1")
    if value > max_rank:
        raise InvalidRequest(f"LoRA rank {value} of {show(name)} is greater than max_lora_rank {max_rank}")
    return value


def _read_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"adapter_config.json has {name} {show(value)}, expected a number")
    return float(value)
