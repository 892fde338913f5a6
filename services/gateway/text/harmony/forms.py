"""The form of an answer in Harmony: reasoning, then a call that is demanded, or a final message with a form."""

from __future__ import annotations

from typing import Any

from services.gateway.text.harmony.markers import CHANNEL, END, MESSAGE, START
from services.gateway.text.harmony.parser import Beginning

_TEXT = {"type": "any_text"}
_ANALYSIS = {"type": "const_string", "value": f"{CHANNEL}analysis{MESSAGE}"}
_NEXT_HEADER = {"type": "const_string", "value": f"{END}{START}assistant"}


def harmony_format(beginning: Beginning, calls: list[dict[str, Any]], final: dict[str, Any] | None) -> dict[str, Any]:
    """The format of structural tags of a whole answer; `beginning` is `HEADER` or `MESSAGE`.

    `calls`: the tags of calls that the answer may be, by `form_of_calls`. `final`: the format of the final message that
    it may be instead; None: it may be none. The final channel has the form, reasoning before it is free.
    """
    tags = list(calls)
    if final is not None:
        tags.append({"type": "tag", "begin": f"{CHANNEL}final{MESSAGE}", "content": final, "end": ""})
    answer = {"type": "or", "elements": tags}
    thought_first = {"type": "sequence", "elements": [_ANALYSIS, _TEXT, _NEXT_HEADER, answer]}
    whole = {"type": "or", "elements": [*tags, thought_first]}
    if beginning is Beginning.HEADER:
        return whole
    return {"type": "sequence", "elements": [{"type": "const_string", "value": f"{START}assistant"}, whole]}
