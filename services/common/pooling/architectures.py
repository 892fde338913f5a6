"""What the architecture that a config.json names says of a model's head."""

from __future__ import annotations

from typing import Any

from services.common.encoders.encoder_types import is_encoder_type
from services.common.families.registry import FAMILIES

_CLASSIFIER, _TOKEN_CLASSIFIER = "ForSequenceClassification", "ForTokenClassification"
_COLBERT = "HF_ColBERT"


def has_language_head(raw: dict[str, Any]) -> bool:
    """Whether a model can generate: a decoder whose architecture is that of its family, or is not named."""
    if is_encoder_type(raw):
        return False
    architecture, family = _architecture_of(raw), FAMILIES.get(str(raw.get("model_type")))
    if not architecture or family is None:  # those without a family are models of text and images
        return True
    names = (family.architecture, *family.other_architectures)
    return architecture.casefold() in {name.casefold() for name in names}


def is_classifier(raw: dict[str, Any]) -> bool:
    """Whether it gives a value for each of some labels."""
    return _architecture_of(raw).endswith(_CLASSIFIER)


def is_token_classifier(raw: dict[str, Any]) -> bool:
    """Whether it gives these values for each token."""
    return _architecture_of(raw).endswith(_TOKEN_CLASSIFIER)


def is_colbert(raw: dict[str, Any]) -> bool:
    """Whether it gives a short vector for each token, by a layer named linear (ColBERT, arXiv:2004.12832)."""
    return _architecture_of(raw) == _COLBERT


def _architecture_of(raw: dict[str, Any]) -> str:
    """The class of transformers; empty: the file names none."""
    architectures = raw.get("architectures") or []
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""
