"""`SpeechModel`: the tokens by which a speech model is asked for a task, as its generation_config.json has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from services.common.errors import InvalidRequest, ModelError
from services.common.json_files.read_json import read_json
from services.common.model_config import load_model_config
from services.common.shorten import quote

Task = Literal["transcribe", "translate"]

SECONDS_PER_STEP = 0.02  # between two timestamps
FRAMES_PER_STEP = 2  # of features


@dataclass(frozen=True, slots=True)
class SpeechModel:
    """Token ids of a Whisper model."""

    start: int
    end: int  # every text token has a lower id
    no_speech: int  # what the model's first token would be where nobody speaks
    first_timestamp: int  # 0.00 s; each further one is 0.02 s later
    max_initial_timestamp: int | None  # steps that the first timestamp may have at most
    previous: int | None  # before the text of earlier windows
    languages: Mapping[str, int]  # by code, such as "en"; empty: the model knows English alone
    tasks: Mapping[str, int]  # empty: the model only transcribes
    suppressed: tuple[int, ...]  # tokens that are no speech
    # Heads of cross attention, (layer, head), whose weights tell when tokens are said.
    alignment_heads: tuple[tuple[int, int], ...] = ()
    filter_width: int = 7  # weights whose median stands for the one in the middle

    def task_tokens(self, task: Task, language: str | None) -> list[int]:
        """What follows the first token. Raises `InvalidRequest` for what the model cannot do."""
        if not self.languages:
            if task != "transcribe" or language not in (None, "en"):
                raise InvalidRequest("the model only transcribes English", "language")
            return []
        assert language is not None, "it has been detected"
        return [self.languages[self.language_code(language)], self.tasks[task]]

    def language_code(self, name: str) -> str:
        """The code of a language, given as such or by its English name. Raises `InvalidRequest` if it is unknown."""
        code = name.strip().lower()
        code = _codes_by_name().get(code, code)
        if code not in self.languages:
            raise InvalidRequest(f"language is {name[:40]!r}, the model knows: {', '.join(self.languages)}", "language")
        return code

    def seconds(self, token_id: int) -> float:
        """The time of a timestamp, from the beginning of its window."""
        return SECONDS_PER_STEP * (token_id - self.first_timestamp)

    def text_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Those of the tokens that are text."""
        return [each for each in token_ids if each < self.end]

    def is_timestamp(self, token_id: int) -> bool:
        """Whether it is a timestamp."""
        return token_id >= self.first_timestamp


def read_speech_model(path: Path) -> SpeechModel:
    """The model in `path`. Raises ModelError, which names what its generation_config.json lacks."""
    config = (read_json(path / "config.json") or {}) | (read_json(path / "generation_config.json") or {})

    def token(name: str, *, is_required: bool = True) -> int | None:
        value = config.get(name)
        if type(value) is not int and (is_required or value is not None):
            raise ModelError(f"generation_config.json in {path} has {name} {value!r}, expected a token id")
        return value

    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    start, none = token("decoder_start_token_id"), token("no_timestamps_token_id")
    if type(end) is not int or start is None or none is None:
        raise ModelError(f"generation_config.json in {path} has eos_token_id {end!r}, expected a token id")
    languages = {key.strip("<|>"): value for key, value in (config.get("lang_to_id") or {}).items()}
    return SpeechModel(
        start=start,
        end=end,
        no_speech=none - 1,  # so it is in all published vocabularies
        first_timestamp=none + 1,
        max_initial_timestamp=config.get("max_initial_timestamp_index"),
        previous=token("prev_sot_token_id", is_required=False),
        languages=languages,
        tasks=dict(config.get("task_to_id") or {}) if languages else {},
        suppressed=tuple(config.get("suppress_tokens") or ()),
        alignment_heads=_read_alignment_heads(path, config.get("alignment_heads")),
        filter_width=_read_filter_width(path, config.get("median_filter_width", 7)),
    )


def _read_alignment_heads(path: Path, named: Any) -> tuple[tuple[int, int], ...]:
    """Those that the files name, or all heads of the upper half of the layers, as the published code."""
    config = load_model_config(path)
    num_layers, num_heads = len(config.cross_layers), config.num_heads
    if not named:
        return tuple((layer, head) for layer in range(num_layers // 2, num_layers) for head in range(num_heads))
    try:
        heads = tuple((int(layer), int(head)) for layer, head in named)
    except (TypeError, ValueError):
        heads = ()
    if not heads or not all(0 <= layer < num_layers and 0 <= head < num_heads for layer, head in heads):
        raise ModelError(
            f"generation_config.json in {path} has alignment_heads {quote(str(named))}, expected pairs of a "
            f"layer below {num_layers} and a head below {num_heads}"
        )
    return heads


def _read_filter_width(path: Path, width: Any) -> int:
    if type(width) is not int or width not in range(1, 100, 2):
        raise ModelError(f"config.json in {path} has median_filter_width {width!r}, expected an odd number below 100")
    return width


def _codes_by_name() -> Mapping[str, str]:
    """Codes of languages by their English names, as Whisper's own tokenizer has them."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    return TO_LANGUAGE_CODE


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the speech: its times in seconds, from the beginning of the sound, and its tokens."""

    start: float
    end: float
    token_ids: list[int]  # with the timestamps around it
    first_token: int = 0  # its index in the output for the window


@dataclass(frozen=True, slots=True)
class Window:
    """What a window of sound contains: complete segments, and where the next window begins."""

    segments: list[Segment]
    num_frames: int  # of features to the next window


def split_window(
    model: SpeechModel, token_ids: Sequence[int], start_s: float, window_s: float, window_frames: int
) -> Window:
    """Cuts the output for a window at its timestamps.

    Two timestamps side by side end a segment and begin the next one. What follows the last of such pairs may be cut off
    by the window's end, so the next window begins there; unless a single timestamp ends the output.
    """
    tokens = [each for each in token_ids if each != model.end]
    stamps = [model.is_timestamp(each) for each in tokens]
    cuts = [i for i in range(1, len(tokens)) if stamps[i - 1] and stamps[i]]
    ends_alone = stamps[-2:] == [False, True]
    if not cuts:
        end_s = window_s
        times = [model.seconds(each) for each in tokens if model.is_timestamp(each)]
        if times and times[-1] > 0:
            end_s = times[-1]
        has_text = any(each < model.end for each in tokens)
        return Window([Segment(start_s, start_s + end_s, tokens)] if has_text else [], window_frames)
    if ends_alone:
        cuts = [*cuts, len(tokens)]
    segments, first = [], 0
    for cut in cuts:
        part = tokens[first:cut]
        if any(each < model.end for each in part):
            segments.append(Segment(start_s + model.seconds(part[0]), start_s + model.seconds(part[-1]), part, first))
        first = cut
    if ends_alone:
        return Window(segments, window_frames)
    num_steps = tokens[cuts[-1] - 1] - model.first_timestamp
    return Window(segments, num_steps * FRAMES_PER_STEP or window_frames)  # it always goes on
