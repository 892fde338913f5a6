"""`WindowGroup`: the size of the second group of layers in the KV cache, without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """The layers with a window, if they have blocks of their own because other layers have none."""

    window: int  # the longest of theirs
    num_blocks: int  # and one more, the null block, with this index
