"""Checks of the config of speculation. Each raises `ValueError`, naming keys and values."""

from __future__ import annotations

from pathlib import Path

_WITH_HEADS = ("medusa", "eagle3")


def check_lookup_lengths(shortest: int, longest: int) -> None:
    """The lengths of the n-grams that are looked up."""
    if shortest > longest:
        raise ValueError(f"scheduler.prompt_lookup_min is {shortest}, more than prompt_lookup_max {longest}")


def check_speculation_model(method: str, model: Path | None, dense_backend: str) -> None:
    """A method with heads needs their directory, and a backend that gives hidden states."""
    if model is None:
        if method in _WITH_HEADS:
            raise ValueError(f"scheduler.speculation {method!r} needs scheduler.speculation_model, a directory")
        return
    if method not in _WITH_HEADS:
        named = " or ".join(map(repr, _WITH_HEADS))
        raise ValueError(f"scheduler.speculation_model {str(model)!r} belongs to {named}, speculation is {method!r}")
    if not model.is_dir():
        raise ValueError(f"scheduler.speculation_model {str(model)!r} is not a directory")
    if dense_backend == "tensorrt":
        raise ValueError(
            f"scheduler.speculation {method!r}: TensorRT gives no hidden states: set dense.backend to torch"
        )


def check_draft_model(method: str, model: Path | None) -> None:
    """The method 'draft_model' needs a model."""
    if model is None:
        if method == "draft_model":
            raise ValueError("scheduler.speculation 'draft_model' needs scheduler.draft_model, a model's directory")
        return
    if method != "draft_model":
        raise ValueError(f"scheduler.draft_model {str(model)!r} belongs to 'draft_model', speculation is {method!r}")
    if not model.is_dir():
        raise ValueError(f"scheduler.draft_model {str(model)!r} is not a directory")
