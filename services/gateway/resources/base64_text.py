"""Base64 in requests."""

from __future__ import annotations

import binascii

from services.common.errors import InvalidRequest

_PIECE = 2**20  # characters that are decoded at a time: the interpreter lock is held meanwhile


def decode_base64(text: str, name: str) -> bytes:
    """The bytes of a text, which may be long: then call it in a thread. `name` is what the client calls it.

    Raises `InvalidRequest` for anything else.
    """
    try:
        pieces = [
            binascii.a2b_base64(text[start : start + _PIECE], strict_mode=True)
            for start in range(0, len(text), _PIECE)
        ]
    except ValueError as error:
        raise InvalidRequest(f"{name} is not base64: {error}", name) from error
    return b"".join(pieces)
