"""`ReasoningFormat`: how a model marks its reasoning, chosen by its chat template or by the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.gateway.text.harmony import HARMONY, is_harmony_template
from services.gateway.text.reasoning.think_tags import BEGIN, END, Beginning

AUTO, NONE = "auto", "none"
_DEEPSEEK = "｜Assistant｜"  # DeepSeek's role token


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One format. All but Harmony put the reasoning between <think> and </think> before the answer."""

    name: str  # in gateway.reasoning_parser
    always_reasons: bool  # whether an answer begins with reasoning even without <think>

    def beginning(self, prompt_end: str, open_message: str | None) -> Beginning:
        """What the answer to a prompt begins with.

        `prompt_end`: the last characters of the prompt. `open_message`: the text of the assistant's message that the
        answer continues, if it does.
        """
        text = prompt_end.rstrip() if open_message is None else open_message
        begin, end = text.rfind(BEGIN), text.rfind(END)
        if open_message is None:  # elsewhere in the prompt a marker may be part of a message
            begin = begin if text.endswith(BEGIN) else -1
            end = end if text.endswith(END) else -1
        if begin > end:
            return Beginning.REASONING
        if end >= 0 or (open_message and open_message.strip()):
            return Beginning.CONTENT
        return Beginning.REASONING if self.always_reasons else Beginning.EITHER


FORMATS: Mapping[str, ReasoningFormat] = {
    each.name: each
    for each in (ReasoningFormat("deepseek_r1", True), ReasoningFormat("qwen3", False), ReasoningFormat(HARMONY, False))
}


def choose_reasoning_format(setting: str, template: str) -> ReasoningFormat | None:
    """The format of `gateway.reasoning_parser`, or for `auto` that of the chat template; None if there is none."""
    if setting == AUTO:
        if is_harmony_template(template):
            return FORMATS[HARMONY]
        name = "deepseek_r1" if _DEEPSEEK in template else "qwen3"
        return FORMATS[name] if END in template else None
    return None if setting == NONE else FORMATS[setting]
