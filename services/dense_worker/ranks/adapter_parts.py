"""A rank's part of an adapter: that of each linear layer is cut as the layer itself is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.common.rank import Rank
from services.dense_worker.kernels.linear.linear import Cut, Linear
from services.lora.checkpoint import LoraTensors


def adapter_part(
    tensors: Mapping[str, LoraTensors], linears: Iterable[Linear], head_dim: int, rank: Rank
) -> dict[str, LoraTensors]:
    """The rank's part of the whole `tensors`, for its own `linears`; views.

    Where ranks have columns of a product, B has their rows and A is whole. Where their products are added up, A has
    their columns and B is whole: so are the deltas, since scale * B A x is the sum of scale * B A_r x_r.
    """
    parts = {}
    for linear in linears:
        for projection in linear.merged_from:
            if (found := tensors.get(projection.name)) is None:
                continue
            if linear.cut is Cut.IN:
                own = rank.share(found.a.shape[1])
                part = LoraTensors(found.a[:, own.start : own.stop], found.b, found.scale)
            else:
                own = rank.share(len(found.b), head_dim if linear.name == "qkv" else 1)
                part = LoraTensors(found.a, found.b[own.start : own.stop], found.scale)
            parts[projection.name] = part
    return parts
