"""`PoolingConfig`: what a checkpoint makes of the hidden states of an input. The dense worker and the gateway read it.

It is in the files of sentence-transformers (modules.json and the folders that it names), or in the architecture that
config.json names. What none of them can say is refused by name.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from services.common.config import ModelSection
from services.common.encoders.encoder_types import is_encoder_type
from services.common.errors import ConfigError, ModelError
from services.common.json_files.fields import Fields
from services.common.json_files.read_json import read_json, read_json_list
from services.common.pooling.architectures import (
    has_language_head,
    is_classifier,
    is_colbert,
    is_token_classifier,
)
from services.common.pooling.pair_template import TEMPLATES, PairTemplate

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"


class PoolingMethod(enum.Enum):
    """Which hidden states of an input, those after the final norm, become its vector."""

    LAST = "last"  # that of the last token
    MEAN = "mean"  # the mean of all
    CLS = "cls"  # that of the first token
    ALL = "all"  # those of all tokens: a vector for each


class TokenHead(enum.Enum):
    """A layer for the state of each token that a checkpoint has besides what makes its vector (BGE-M3).

    It is in a file of its own, `..._linear.safetensors`, as `weight` and `bias`.
    """

    SPARSE = "sparse"  # a number: how much the token counts, at least 0
    COLBERT = "colbert"  # a vector as long as the state

    @property
    def file_stem(self) -> str:
        """The name of its file without the last part."""
        return f"{self.value}_linear"


class PooledActivation(enum.Enum):
    """What follows a dense layer after pooling."""

    NONE = "none"
    TANH = "tanh"
    RELU = "relu"
    GELU = "gelu"


class ClassifierHead(enum.Enum):
    """The layers between the pooled vector and the values of the classes."""

    SCORE = "score"  # one matrix, as decoders have it
    TOKENS = "tokens"  # the rows of tokens of the language head: that of one, or the second minus the first
    ENCODER = "encoder"  # as the encoder's family has it
    EACH_TOKEN = "each_token"  # of each token by itself: a matrix with a bias, mostly nothing before it


@dataclass(frozen=True, slots=True)
class DenseStage:
    """A dense layer after pooling: a folder with the tensors linear.weight [out, in] and perhaps linear.bias."""

    path: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: PooledActivation


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """The vector of an input. A classifier's vector has a value, before any activation, for each of its labels."""

    method: PoolingMethod
    normalizes: bool  # to length 1
    stages: tuple[DenseStage, ...] = ()
    head: ClassifierHead | None = None  # None: vectors are embeddings
    labels: tuple[str, ...] = ()  # of a classifier
    is_multi_label: bool = False  # each label is true or false by itself
    is_raw: bool = False  # the values of labels are shown as they are, without sigmoid or softmax
    tokens: tuple[str, ...] = ()  # those of `ClassifierHead.TOKENS`
    prompts: Mapping[str, str] = field(default_factory=dict)  # what stands before texts for a purpose, by its name
    template: PairTemplate | None = None  # in which a scorer reads pairs; None: as the tokenizer joins them
    max_input_tokens: int | None = None  # which sentence-transformers keeps of longer inputs; None: it says nothing
    token_heads: tuple[TokenHead, ...] = ()  # of an encoder that makes embeddings
    edge_token_ids: tuple[int, int] | None = None  # what an input begins and ends with, of a model with `token_heads`

    @property
    def is_classifier(self) -> bool:
        return self.head is not None

    @property
    def has_each_token(self) -> bool:
        """Whether there is a vector for each token."""
        return self.method is PoolingMethod.ALL

    @property
    def is_scorer(self) -> bool:
        """Whether its only value says how well two texts belong together."""
        return self.is_classifier and len(self.labels) == 1 and not self.has_each_token


def read_pooling(section: ModelSection) -> PoolingConfig | None:
    """What the checkpoint of a section says, or `model.runner` asks for; None: it makes no vectors.

    Raises `ModelError` for what is not supported, naming file and value, and `ConfigError` for contradictory keys.
    """
    path = section.path
    if section.runner == "generate":
        for key in ("classifier_from_token", "reranker"):
            if getattr(section, key) not in ((), "auto", "none"):
                raise ConfigError(f"model.{key} is set, but model.runner is generate")
        return None
    raw = read_json(path / "config.json")
    if raw is None:
        raise ModelError(f"model directory {path} has no config.json")
    is_encoder, template = is_encoder_type(raw), _read_template(section, raw)
    if is_encoder and template is not None:
        raise ConfigError(f"model.reranker is {section.reranker}, but the model is an encoder")
    if is_classifier(raw) and not section.classifier_from_token:
        classifier = _read_classifier(raw, path, is_encoder)
        if template is not None and not classifier.is_scorer:
            num_labels = len(classifier.labels)
            raise ConfigError(f"model.reranker is {section.reranker}, but the model has {num_labels} labels")
        return replace(classifier, template=template)
    if is_token_classifier(raw):
        classifier = _read_classifier(raw, path, is_encoder)
        return replace(classifier, method=PoolingMethod.ALL, head=ClassifierHead.EACH_TOKEN)
    if is_colbert(raw):
        rows, columns = _shape_of(path, "linear.weight")
        stage = DenseStage(path, columns, rows, has_bias=False, activation=PooledActivation.NONE)
        return PoolingConfig(PoolingMethod.ALL, normalizes=True, stages=(stage,))
    if tokens := section.classifier_from_token or (() if template is None else template.tokens):
        if len(tokens) > 2:
            raise ConfigError(
                f"model.classifier_from_token has {len(tokens)} tokens, expected one, or that of no and that of yes"
            )
        head, labels = ClassifierHead.TOKENS, tokens[-1:]
        return PoolingConfig(PoolingMethod.LAST, False, head=head, labels=labels, tokens=tokens, template=template)
    modules, pooling = read_json_list(path / MODULES_FILE), None
    if modules is not None:
        pooling = replace(_read_modules(modules, path), prompts=_read_prompts(path))
    elif section.runner == "pooling" or is_encoder or not has_language_head(raw):
        method = PoolingMethod.CLS if is_encoder else PoolingMethod.LAST
        pooling = PoolingConfig(method, normalizes=True, prompts=_read_prompts(path))
    if pooling is None or not is_encoder or pooling.has_each_token:
        return pooling
    return _with_token_heads(pooling, path, raw)


def _with_token_heads(pooling: PoolingConfig, path: Path, raw: dict[str, Any]) -> PoolingConfig:
    """The same with the layers for tokens that lie beside the checkpoint."""
    heads = tuple(head for head in TokenHead if (path / f"{head.file_stem}.safetensors").is_file())
    for head in TokenHead:
        if head not in heads and (file := path / f"{head.file_stem}.pt").is_file():
            raise ModelError(
                f"{file} is a file of pickled tensors, which is never loaded: convert it to "
                f"{head.file_stem}.safetensors with the tensors weight and bias (docs/embeddings.md), or remove it"
            )
    if not heads:
        return pooling
    edges = raw.get("bos_token_id", 0), raw.get("eos_token_id", 2)  # otherwise those of XLM-R's class
    if not all(type(each) is int for each in edges):
        raise ModelError(f"{path} has bos_token_id and eos_token_id {edges!r}, expected token ids")
    return replace(pooling, token_heads=heads, edge_token_ids=edges)


def _read_prompts(path: Path) -> dict[str, str]:
    """The prompts that sentence-transformers knows of a model, by name."""
    prompts = (read_json(path / PROMPTS_FILE) or {}).get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(each, str) for each in prompts.values()):
        raise ModelError(f"{path / PROMPTS_FILE} has prompts {prompts!r}, expected texts by name")
    return prompts


def _read_template(section: ModelSection, raw: dict[str, Any]) -> PairTemplate | None:
    """`is_original_qwen3_reranker` is what vLLM's users write into config.json."""
    if section.reranker == "auto":
        return TEMPLATES["qwen3"] if raw.get("is_original_qwen3_reranker") is True else None
    return TEMPLATES.get(section.reranker)


def _read_classifier(raw: dict[str, Any], path: Path, is_encoder: bool) -> PoolingConfig:
    names = raw.get("id2label")
    if names is None:
        num_labels = raw.get("num_labels", 2)
        names = {str(i): f"LABEL_{i}" for i in range(num_labels)} if type(num_labels) is int else None
    if not isinstance(names, dict) or not names or {str(key) for key in names} != set(map(str, range(len(names)))):
        raise ModelError(f"{path} has id2label {names!r}, expected a name for each number from 0")
    labels = tuple(str(names[key]) for key in sorted(names, key=int))
    problem = raw.get("problem_type")
    if problem not in (None, "regression", "single_label_classification", "multi_label_classification"):
        raise ModelError(f"{path} has problem_type {problem!r}, supported: those of transformers")
    method = PoolingMethod.CLS if is_encoder else PoolingMethod.LAST
    if raw.get("model_type") == "modernbert" and raw.get("classifier_pooling", "cls") == "mean":
        method = PoolingMethod.MEAN
    head = ClassifierHead.ENCODER if is_encoder else ClassifierHead.SCORE
    return PoolingConfig(
        method,
        False,
        head=head,
        labels=labels,
        is_multi_label=problem == "multi_label_classification",
        is_raw=_has_no_activation(raw, path) or (problem == "regression" and len(labels) > 1),
    )


def _has_no_activation(raw: dict[str, Any], path: Path) -> bool:
    """Whether the cross-encoder of sentence-transformers gives its value as it is; by default it is a sigmoid's."""
    settings = raw.get("sentence_transformers")
    name = settings.get("activation_fn") if isinstance(settings, dict) else None
    name = name or raw.get("sbert_ce_default_activation_function") or "torch.nn.modules.activation.Sigmoid"
    kind = str(name).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise ModelError(f"{path} has activation_fn {name!r}, supported: Sigmoid, Identity")
    return kind == "Identity"


def _read_modules(modules: list[Any], path: Path) -> PoolingConfig:
    """The parts of a model of sentence-transformers: a Transformer, a Pooling, then dense layers and a Normalize.

    Without a Pooling there is a vector for each token, with length 1: these are PyLate's.
    """
    where = str(path / MODULES_FILE)
    parts = [Fields(each, where) for each in modules]
    kinds = [str(part.get("type", "")).rpartition(".")[2] for part in parts]
    if kinds[:1] != ["Transformer"] or kinds[1:2] not in (["Pooling"], ["Dense"]):
        raise ModelError(f"{where} has modules {kinds}, expected first Transformer, then Pooling or Dense")
    has_pooling = kinds[1] == "Pooling"
    method = _read_method(_folder(parts[1], path)) if has_pooling else PoolingMethod.ALL
    first, normalizes, stages = 1 + has_pooling, False, list[DenseStage]()
    for kind, part in zip(kinds[first:], parts[first:], strict=True):
        if kind == "Normalize":
            normalizes = True
        elif kind == "Dense" and not normalizes:
            stages.append(_read_dense(_folder(part, path)))
        else:
            raise ModelError(f"{where} has module {kind!r} after {kinds[:first]}, supported: Dense, then Normalize")
    settings = read_json(_folder(parts[0], path) / "sentence_bert_config.json") or {}
    length = settings.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ModelError(f"{path} has max_seq_length {length!r}, expected a whole number of at least 1")
    if settings.get("do_lower_case"):
        raise ModelError(f"{path} has do_lower_case in sentence_bert_config.json, supported: by its tokenizer only")
    return PoolingConfig(method, normalizes or not has_pooling, tuple(stages), max_input_tokens=length)


def _shape_of(path: Path, name: str) -> tuple[int, int]:
    """The shape of a matrix of the checkpoint. Raises `ModelError` if there is none of this name."""
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            names = tensors.keys()
            if name in names:
                shape = tensors.get_slice(name).get_shape()
                if len(shape) == 2:
                    return shape[0], shape[1]
    raise ModelError(f"{path} has no matrix {name}, which its architecture calls for")


def _folder(part: Fields, path: Path) -> Path:
    """The folder of a module, which lies within the model's."""
    name = part.get("path", "")
    folder = path / str(name)
    if not isinstance(name, str) or not folder.resolve().is_relative_to(path.resolve()):
        raise part.error("path", name, "expected a folder of the model")
    return folder


def _read_method(folder: Path) -> PoolingMethod:
    fields = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
    if (mode := fields.get("pooling_mode")) is not None:
        modes = [mode] if isinstance(mode, str) else list(mode)
    else:
        prefix = "pooling_mode_"
        modes = [name.removeprefix(prefix) for name in fields.names() if name.startswith(prefix) and fields.get(name)]
    found = {
        "cls": PoolingMethod.CLS,
        "cls_token": PoolingMethod.CLS,
        "mean": PoolingMethod.MEAN,
        "mean_tokens": PoolingMethod.MEAN,
        "lasttoken": PoolingMethod.LAST,
    }
    if len(modes) != 1 or modes[0] not in found:
        raise ModelError(f"{fields.where} pools by {modes}, supported: one of cls, mean, lasttoken")
    return found[modes[0]]


def _read_dense(folder: Path) -> DenseStage:
    fields = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
    sizes = [fields.size(name, 2**20) for name in ("in_features", "out_features")]
    activations = {
        "Identity": PooledActivation.NONE,
        "Tanh": PooledActivation.TANH,
        "ReLU": PooledActivation.RELU,
        "GELU": PooledActivation.GELU,
    }
    name = str(fields.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in activations:
        raise fields.unsupported("activation_function", name, ", ".join(activations))
    return DenseStage(folder, sizes[0], sizes[1], bool(fields.get("bias", True)), activations[name])
