"""Models that see pictures, with a tokenizer, and the tokens that Hugging Face generates with the same pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, PreTrainedModel

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.support.dense.vision_models import load_true_model, make_vision_model, true_pixels

IMAGE_TOKEN, START, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
PLACE = f"{START}{IMAGE_TOKEN}{END}"
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    f"{{% if part.type == 'image' %}}{START}{IMAGE_TOKEN}{END}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_served_vision_model(path: Path, variant: str = "qwen2_5_vl", **text: Any) -> Path:
    """A random model with the embedded model's tokenizer, which has tokens for pictures, too; `text`: of its config."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN, START, END]})
    tokenizer.chat_template = TEMPLATE
    ids = tokenizer.convert_tokens_to_ids([IMAGE_TOKEN, START, END])
    names = ("image_token_id", "vision_start_token_id", "vision_end_token_id")
    text = {"vocab_size": len(tokenizer), **text}
    make_vision_model(path, variant, text=text, **dict(zip(names, ids, strict=True)))
    tokenizer.save_pretrained(path)
    return path


@lru_cache(maxsize=2)
def _truth(path: Path, variant: str) -> PreTrainedModel:
    return load_true_model(path, variant)


def prompt_ids(path: Path, text: str, num_tokens: Sequence[int]) -> list[int]:
    """Token ids of a rendered text, in which each picture's token stands once, with so many for each picture."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    pieces = text.split(IMAGE_TOKEN)
    assert len(pieces) == len(num_tokens) + 1
    whole = "".join(piece + IMAGE_TOKEN * count for piece, count in zip(pieces, [*num_tokens, 0], strict=True))
    return tokenizer.encode(whole, add_special_tokens=False)


@torch.inference_mode()
def expected_tokens(
    path: Path, text: str, pictures: Sequence[Image.Image], max_tokens: int, variant: str = "qwen2_5_vl"
) -> list[int]:
    """The tokens that Hugging Face generates greedily after a rendered text with pictures."""
    model = _truth(path, variant)
    given = dict(true_pixels(variant, pictures)) if pictures else {}
    merge = model.config.vision_config.spatial_merge_size
    counts = [int(grid.prod()) // merge**2 for grid in given.get("image_grid_thw", ())]
    ids = torch.tensor([prompt_ids(path, text, counts)])
    given["mm_token_type_ids"] = (ids == model.config.image_token_id).long()
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


def png(picture: Image.Image) -> bytes:
    """The picture as a file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def data_url(picture: Image.Image) -> str:
    """The picture as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"
