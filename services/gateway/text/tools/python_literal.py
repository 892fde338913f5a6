"""Turns literals of Python into JSON: models that write Python also write None, True and single quotes."""

from __future__ import annotations

import ast
import json
import math
from typing import Any

MAX_CHARACTERS = 64 * 2**10
_NAMES = {"true": True, "false": False, "null": None}  # JSON's, which models mix in


def literal_to_json(text: str) -> str:
    """The JSON text of a value: JSON, or a literal of Python.

    That is None, a boolean, number or string, or a list, tuple or dictionary (with strings as keys) of such values.
    Raises `ValueError` for anything else. The caller limits the depth.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"the value has {len(text)} characters, at most {MAX_CHARACTERS} allowed")
    text = text.strip()
    try:
        value = _read(text)
        encoded = json.dumps(value, ensure_ascii=False, allow_nan=False)
        encoded.encode()  # no halves of characters
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"not a literal: {error}") from error
    return encoded


def _read(text: str) -> Any:
    try:
        return json.loads(text)  # the escapes of strings differ from Python's
    except ValueError:
        return _value(ast.parse(text, mode="eval").body)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand)
        if type(value) in (int, float) and math.isfinite(value):
            return -value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key) if key is not None else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_value, node.values), strict=True))
    raise ValueError(f"not a literal: {type(node).__name__}")
