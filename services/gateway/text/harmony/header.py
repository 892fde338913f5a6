"""The header of a Harmony message: `assistant<|channel|>commentary to=functions.f <|constrain|>json`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.gateway.text.harmony.markers import CHANNEL, CONSTRAIN

_ROLE = re.compile(r"\s*[^\s<]{0,80}")
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*([A-Za-z_]{{0,32}})")
_RECIPIENT = re.compile(r"to=([^\s<]{1,80})")
_CONTENT_TYPE = re.compile(rf"{re.escape(CONSTRAIN)}\s*[A-Za-z_]{{0,32}}")


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says. `rest` is text in it that has no meaning there, as where <|message|> was left out."""

    channel: str  # empty: none
    recipient: str  # of a call, such as "functions.f"; empty: none
    rest: str


def read_header(text: str, has_role: bool) -> Header:
    """Reads what stands between <|start|> and <|message|>; `has_role`: it begins with a role."""
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    rest = _CONTENT_TYPE.sub(" ", _RECIPIENT.sub(" ", _CHANNEL.sub(" ", text)))
    if has_role:
        rest = _ROLE.sub("", rest, count=1)
    return Header(channel[1] if channel else "", recipient[1] if recipient else "", rest.strip())
