"""BLIP-2 (arXiv:2301.12597): learned queries read a tower's rows by cross attention, and become rows of the prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.common.families.kinds import Activation
from services.common.vision.llava import StretchedLayout
from services.common.vision.patch_tower import BLIP2, TowerWithPatches, read_patch_tower
from services.common.vision.vision_fields import VisionFields

# For files without a chat template: all pictures, the first token of a text, and the paper's form of questions
# (section 4.2). Without any text the model describes the picture. T5's texts have no first token, but a last one.
CHAT_TEMPLATE = """\
{%- for message in messages if message.content is not string -%}
  {%- for part in message.content if part.type == 'image' -%}<picture>{%- endfor -%}
{%- endfor -%}
{{- bos_token or '' -}}
{%- set chat = namespace(text='') -%}
{%- for message in messages -%}
  {%- set own = namespace(text='') -%}
  {%- set parts = [{'type': 'text', 'text': message.content}] if message.content is string else message.content -%}
  {%- for part in parts -%}
    {%- if part.type == 'text' -%}{%- set own.text = (own.text ~ ' ' ~ (part.text | trim)) | trim -%}{%- endif -%}
  {%- endfor -%}
  {%- if own.text -%}
    {%- set speaker = {'user': 'Question: ', 'assistant': 'Answer: '}.get(message.role, '') -%}
    {%- set chat.text = (chat.text ~ ' ' ~ speaker ~ own.text) | trim -%}
  {%- endif -%}
{%- endfor -%}
{{- chat.text -}}
{%- if add_generation_prompt and chat.text -%}{{ ' Answer:' }}{%- endif -%}
{%- if not bos_token -%}{{ eos_token }}{%- endif -%}"""


@dataclass(frozen=True, slots=True)
class QueryFormer:
    """The sizes of the Q-Former: layers of queries, some of which see the picture, too."""

    num_queries: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    cross_interval: int  # every so many layers, beginning with the first, have cross attention
    activation: Activation
    norm_eps: float


@dataclass(frozen=True, slots=True)
class Blip2Tower(TowerWithPatches):
    """A tower of patches, the Q-Former, and a matrix."""

    has_qkv_bias: bool
    queries: QueryFormer


def read_blip2(fields: VisionFields) -> tuple[Blip2Tower, StretchedLayout]:
    """The tower and the layout of a model's files."""
    fields.only("model_type", fields.tower.get("model_type"), BLIP2)
    patches = read_patch_tower(fields, fields.size("num_hidden_layers"), has_final_norm=True)
    count, side = fields.outer["num_query_tokens"], patches.image_size
    of_queries = replace(fields, tower={**fields.outer["qformer_config"], "num_query_tokens": count})
    queries = QueryFormer(
        of_queries.size("num_query_tokens"),
        of_queries.size("num_hidden_layers"),
        of_queries.size("hidden_size"),
        of_queries.size("intermediate_size"),
        of_queries.size("num_attention_heads"),
        of_queries.size("cross_attention_frequency"),
        of_queries.activation(of_queries.tower, "hidden_act"),
        float(of_queries.tower["layer_norm_eps"]),
    )
    if queries.hidden_size % queries.num_heads:
        raise fields.error("num_attention_heads", queries.num_heads, f"expected a divisor of {queries.hidden_size}")
    fields.only_square("size", side)
    text = fields.outer["text_config"]
    width = text["hidden_size"] if "hidden_size" in text else text["d_model"]
    tower = Blip2Tower(patches, width, bool(fields.tower["qkv_bias"]), queries)
    return tower, StretchedLayout(side, fields.resample, queries.num_queries)
