"""Models that see pictures, with a tokenizer, and the tokens that Hugging Face generates with the same pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, PreTrainedModel

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2, sampling_pb2
from tests.support.dense.vision_models import load_true_model, make_vision_model, true_pixels

IMAGE_TOKEN, START, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
# That stand around a picture's, by variant.
_BREAK_AND_END = ["[IMG_BREAK]", "[IMG_END]"]
_OTHER_TOKENS = {
    "internvl": ["<img>", "</img>"],
    "gemma3": ["<start_of_image>", "<end_of_image>"],
    "llava_pixtral": _BREAK_AND_END,
    "mistral3": _BREAK_AND_END,
}
PLACE = f"{START}{IMAGE_TOKEN}{END}"
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    f"{{% if part.type == 'image' %}}{START}{IMAGE_TOKEN}{END}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_served_vision_model(
    path: Path,
    variant: str = "qwen2_5_vl",
    image_token: str = IMAGE_TOKEN,
    template: str | None = TEMPLATE,
    **text: Any,
) -> Path:
    """A random model with the embedded model's tokenizer, which has tokens for pictures, too; `text`: of its config."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    tokens = [image_token, START, END, *_OTHER_TOKENS.get(variant, ())]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    if variant == "gemma3" and template is not None:
        template = template.replace(PLACE, "<start_of_image>")
    tokenizer.chat_template = template
    ids = tokenizer.convert_tokens_to_ids([image_token, START, END])
    names = ("image_token_id", "vision_start_token_id", "vision_end_token_id")
    text = {"vocab_size": len(tokenizer), **text}
    make_vision_model(path, variant, text=text, **dict(zip(names, ids, strict=True)))
    tokenizer.save_pretrained(path)
    return path


@lru_cache(maxsize=2)
def _truth(path: Path, variant: str) -> PreTrainedModel:
    return load_true_model(path, variant)


def prompt_ids(path: Path, text: str, places: Sequence[str]) -> list[int]:
    """Token ids of a rendered text, in which each picture's token stands once, with these texts in place of them.

    As in transformers' processors with the special tokens around a text.
    """
    tokenizer = AutoTokenizer.from_pretrained(path)
    pieces = text.split(IMAGE_TOKEN)
    whole = "".join(piece + place for piece, place in zip(pieces, [*places, ""], strict=True))
    return tokenizer.encode(whole)


def _places(model: PreTrainedModel, given: Mapping[str, torch.Tensor]) -> list[str]:
    """What stands in a prompt for each picture that a processor has `given`."""
    if "image_grid_thw" in given:
        square = model.config.vision_config.spatial_merge_size**2
        return [IMAGE_TOKEN * (int(grid.prod()) // square) for grid in given["image_grid_thw"]]
    if "num_crops" in given:  # of Gemma 3
        tokens = IMAGE_TOKEN * model.config.mm_tokens_per_image
        return [f"\n\n<start_of_image>{tokens}<end_of_image>\n\n"] * len(given["pixel_values"])
    if "num_patches" in given:
        counts = [model.config.image_seq_length * int(each) for each in given["num_patches"]]
        return [f"<img>{IMAGE_TOKEN * each}</img>" for each in counts]
    if model.config.vision_config.model_type == "pixtral":
        unit = model.config.vision_config.patch_size * getattr(model.config, "spatial_merge_size", 1)
        grids = [(height // unit, width // unit) for height, width in given["image_sizes"].tolist()]
        return ["[IMG_BREAK]".join([IMAGE_TOKEN * columns] * rows) + "[IMG_END]" for rows, columns in grids]
    return [IMAGE_TOKEN * len(rows) for rows in model.get_image_features(**given).pooler_output]


@torch.inference_mode()
def expected_tokens(
    path: Path, text: str, pictures: Sequence[Image.Image], max_tokens: int, variant: str = "qwen2_5_vl"
) -> list[int]:
    """The tokens that Hugging Face generates greedily after a rendered text with pictures."""
    model = _truth(path, variant)
    if variant == "gemma3":
        text = text.replace(PLACE, IMAGE_TOKEN)
    given = dict(true_pixels(variant, pictures)) if pictures else {}
    ids = torch.tensor([prompt_ids(path, text, _places(model, given) if pictures else [])])
    if variant.startswith("qwen"):
        given["mm_token_type_ids"] = (ids == model.config.image_token_id).long()
    if variant == "gemma3":
        given["token_type_ids"] = (ids == model.config.image_token_id).long()
    for of_processor in ("num_patches", "num_crops"):
        given.pop(of_processor, None)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        **given,
    )
    return output[0, ids.shape[1] :].tolist()


Turn = tuple[str, Sequence[str | Image.Image]]  # role and parts of a message


def rendered(turns: Sequence[Turn]) -> str:
    """What the template writes of a chat."""
    parts = [
        f"[{role}]{''.join(PLACE if isinstance(each, Image.Image) else each for each in parts)}\n"
        for role, parts in turns
    ]
    return "".join([*parts, "[assistant]"])


def pictures_of(turns: Sequence[Turn]) -> list[Image.Image]:
    """The pictures of a chat, in order."""
    return [each for _, parts in turns for each in parts if isinstance(each, Image.Image)]


def chat_message(turns: Sequence[Turn], max_tokens: int) -> gateway_pb2.GenerateRequest:
    """A chat as clients send it over gRPC: greedy, up to `max_tokens`."""
    message = gateway_pb2.GenerateRequest(max_tokens=max_tokens, ignore_eos=True)
    message.sampling.temperature = 0.0
    for role, parts in turns:
        each = message.chat.messages.add(role=role)
        for part in parts:
            if isinstance(part, Image.Image):
                each.pictures.add(position=len(each.content), data=png(part))
            else:
                each.content += part
    return message


def beams_message(turns: Sequence[Turn], max_tokens: int, num_beams: int) -> gateway_pb2.GenerateRequest:
    """A beam search after a chat, as `transformers.generate` has it by default, which returns all beams."""
    message = chat_message(turns, max_tokens)
    message.ClearField("sampling")
    message.ClearField("ignore_eos")
    message.n = message.best_of = num_beams
    message.beam_search.length_penalty = 1.0
    message.beam_search.early_stopping = sampling_pb2.EARLY_STOPPING_HEURISTIC
    return message


def png(picture: Image.Image) -> bytes:
    """The picture as a file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def data_url(picture: Image.Image) -> str:
    """The picture as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"


class Truth:
    """What Hugging Face computes of chats with pictures."""

    def __init__(self, path: Path, variant: str = "qwen2_5_vl") -> None:
        self._path, self._variant = path, variant

    @cached_property
    def _model(self) -> Any:
        return load_true_model(self._path, self._variant)

    def _inputs(self, turns: Sequence[Turn]) -> dict[str, torch.Tensor]:
        given = dict(true_pixels(self._variant, pictures_of(turns)))
        ids = torch.tensor([prompt_ids(self._path, rendered(turns), _places(self._model, given))])
        mask = torch.ones_like(ids)
        is_picture = (ids == self._model.config.image_token_id).long()
        return {**given, "input_ids": ids, "attention_mask": mask, "mm_token_type_ids": is_picture}

    def num_prompt_tokens(self, turns: Sequence[Turn]) -> int:
        """Of a chat, with those of its pictures."""
        return len(self.prompt_ids(turns))

    def prompt_ids(self, turns: Sequence[Turn]) -> list[int]:
        """The tokens of a chat, with all that stand for its pictures."""
        ids: list[int] = self._inputs(turns)["input_ids"][0].tolist()
        return ids

    @torch.inference_mode()
    def generate(self, turns: Sequence[Turn], max_tokens: int, **options: Any) -> tuple[list[list[int]], list[float]]:
        """The token ids of all answers, and the scores of beams."""
        given = self._inputs(turns)
        output = self._model.generate(
            **given,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        rows = output.sequences[:, given["input_ids"].shape[1] :].tolist()
        return rows, output.sequences_scores.tolist() if "num_beams" in options else []

    @torch.inference_mode()
    def logprobs(self, turns: Sequence[Turn], token_ids: Sequence[int]) -> list[float]:
        """Of the tokens of an answer."""
        given = self._inputs(turns)
        start = given["input_ids"].shape[1]
        answer = torch.tensor([list(token_ids)])
        given["input_ids"] = torch.cat([given["input_ids"], answer], 1)
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["mm_token_type_ids"] = torch.nn.functional.pad(given["mm_token_type_ids"], (0, len(token_ids)))
        rows = self._model(**given, use_cache=False).logits[0, start - 1 : -1].log_softmax(-1)
        return rows.gather(1, answer[0, :, None])[:, 0].tolist()
