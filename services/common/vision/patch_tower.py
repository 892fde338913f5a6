"""`PatchTower`: the sizes of a tower of square pictures with learned positions, as CLIP, SigLIP and BLIP-2 have it."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.families.kinds import Activation
from services.common.vision.layout import PictureShape
from services.common.vision.vision_fields import VisionFields


@dataclass(frozen=True, slots=True)
class PatchTower:
    """Tiles of one size; each patch has a row, and a class token may come before them."""

    num_layers: int  # that are computed
    hidden_size: int
    intermediate_size: int
    num_heads: int
    image_size: int  # pixels along a side of a tile
    patch_size: int
    activation: Activation
    norm_eps: float
    has_class_token: bool  # with CLIP's the embedding has no bias, and is normalised before the first layer
    has_final_norm: bool  # after the last layer

    @property
    def num_columns(self) -> int:
        """Patches along a side."""
        return self.image_size // self.patch_size

    @property
    def num_rows(self) -> int:
        """Of a tile, with its class token."""
        return self.num_columns**2 + self.has_class_token

    def num_patches(self, shape: PictureShape) -> int:
        """How many rows the tower computes for a picture."""
        return self.num_rows * shape.num_tiles


@dataclass(frozen=True, slots=True)
class TowerWithPatches:
    """A tower of patches, and what makes rows of the prompt of its rows."""

    patches: PatchTower
    width: int  # numbers in a row of the output

    @property
    def num_layers(self) -> int:
        """That are computed."""
        return self.patches.num_layers

    def num_patches(self, shape: PictureShape) -> int:
        """How many rows the tower computes for a picture."""
        return self.patches.num_patches(shape)

    def num_outputs(self, shape: PictureShape) -> int:
        """How many rows of the prompt it computes for a picture."""
        return shape.num_tokens


CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"  # as a vision_config names them
BLIP2 = "blip_2_vision_model"


def read_patch_tower(fields: VisionFields, num_layers: int, *, has_final_norm: bool) -> PatchTower:
    """The tower in a vision_config of CLIP, SigLIP or BLIP-2. num_layers: how many of its layers are computed."""
    fields.only("num_channels", fields.tower.get("num_channels", 3), 3)
    return PatchTower(
        num_layers,
        fields.size("hidden_size"),
        fields.size("intermediate_size"),
        fields.size("num_attention_heads"),
        fields.size("image_size"),
        fields.size("patch_size"),
        fields.activation(fields.tower, "hidden_act"),
        float(fields.tower["layer_norm_eps"]),
        has_class_token=fields.tower.get("model_type") in (CLIP, BLIP2),
        has_final_norm=has_final_norm,
    )
