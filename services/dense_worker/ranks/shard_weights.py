"""Cuts a model's parts for one rank: its rows or columns of each linear layer, and where a checkpoint has them.

What a family is made of is known already: each `Linear` says along which side it is cut. So the whole model is built
without memory, and each of its parts becomes the rank's part, for which the allocator makes tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from services.common.errors import ConfigError
from services.common.families.shape import LayerHeads, ModelConfig
from services.common.rank import Rank
from services.dense_worker.kernels.experts.routed_experts import ExpertLinear
from services.dense_worker.kernels.linear.linear import Cut, Linear, PlainWeight, WeightFormat
from services.dense_worker.kernels.linear.quantized.block_fp8_weight import BlockFp8Weight
from services.dense_worker.kernels.norm.norm import HeadNorms
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.model.head import Embedding
from services.dense_worker.model.latent_attention import LatentOutput, LatentQkv, LatentQueries
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.parameters import Parameter, Source, TensorPart
from services.dense_worker.ranks.sharded_operations import SharedHeadNorms
from services.dense_worker.ranks.source_parts import converted, part_of, zeros

Part = TypeVar("Part")


def shard_weights(config: ModelConfig, whole: ModelWeights, rank: Rank, allocator: WeightAllocator) -> ModelWeights:
    """The rank's part of a model that was built on the meta device. `allocator` makes its tensors."""
    cutter = _Cutter(rank, allocator)
    embedding = cutter.cut(whole.embedding, config.layer_heads[0])
    layers = [cutter.cut(layer, heads) for layer, heads in zip(whole.layers, config.layer_heads, strict=True)]
    return ModelWeights(embedding, tuple(layers), cutter.cut(whole.head, config.layer_heads[0]))


def vocab_rows(vocab_size: int, rank: Rank) -> range:
    """The rank's rows of the vocabulary. All ranks have equally many; those beyond `vocab_size` mean no token."""
    num_rows = -(-vocab_size // rank.count)
    return range(rank.index * num_rows, (rank.index + 1) * num_rows)


class _Cutter:
    def __init__(self, rank: Rank, allocator: WeightAllocator) -> None:
        self._rank = rank
        self._allocator = allocator
        self._made: dict[int, Parameter] = {}  # by the id of the whole tensor: some parts share one

    def cut(self, part: Part, heads: LayerHeads) -> Part:
        """The rank's part of `part`, of a layer with these heads."""
        return self._cut(part, heads)

    def _cut(self, part: Any, heads: LayerHeads) -> Any:
        match part:
            case Parameter():
                return self._rows(part, [range(len(part.data))])
            case torch.Tensor():  # what steps count
                return torch.zeros_like(part, device=self._allocator.device)
            case Embedding():
                table = self._vocabulary(part.table)
                rest = {each.name: self._cut(getattr(part, each.name), heads) for each in fields(part)[1:]}
                return replace(part, table=table, **rest)
            case Linear():
                return self._linear(part, heads)
            case ExpertLinear():
                return self._experts(part)
            case HeadNorms():
                return self._head_norms(part, heads)
            case LatentQkv():
                return self._latent_qkv(part, heads)
            case LatentOutput():
                values = self._rows(part.values, [self._rank.share(heads.num_heads)])
                return replace(part, values=values, after=self._cut(part.after, heads))
            case tuple():
                return tuple(self._cut(each, heads) for each in part)
        if is_dataclass(part):
            return replace(part, **{each.name: self._cut(getattr(part, each.name), heads) for each in fields(part)})
        return part

    def _linear(self, linear: Linear, heads: LayerHeads) -> Linear:
        if linear.name == "lm_head":
            bias = linear.bias and self._vocabulary(linear.bias)
            if isinstance(linear.weight, PlainWeight):
                weight: WeightFormat = PlainWeight(self._vocabulary(linear.weight.matrix))
            else:
                weight = self._rows_of_all(linear.weight, [self._rank.share(linear.out_features)])
            return replace(
                linear, out_features=len(vocab_rows(linear.out_features, self._rank)), weight=weight, bias=bias
            )
        if linear.cut is Cut.IN:
            columns = self._rank.share(linear.in_features)
            return replace(
                linear,
                in_features=len(columns),
                weight=self._columns_of(linear.weight, columns, linear.in_features),
                bias=linear.bias and self._added_once(linear.bias),
            )
        return self._of_rows(linear, self._rows_of(linear, heads))

    def _of_rows(self, linear: Linear, rows: Sequence[range]) -> Linear:
        sizes = _overlaps([each.out_features for each in linear.merged_from], rows)
        return replace(
            linear,
            out_features=sum(map(len, rows)),
            merged_from=tuple(
                replace(each, out_features=size) for each, size in zip(linear.merged_from, sizes, strict=True)
            ),
            weight=self._rows_of_all(linear.weight, rows),
            bias=linear.bias and self._rows(linear.bias, rows),
        )

    def _latent_qkv(self, latent: LatentQkv, heads: LayerHeads) -> LatentQkv:
        """Its heads of queries. Latent vectors, and the part of keys that heads share, are whole on each rank."""
        size, queries = latent.down.merged_from[0].out_features, latent.queries
        own = range(size)
        if queries is None:
            own = self._rank.share(size, size // heads.num_heads)
        else:
            rows = self._rank.share(queries.up.out_features, queries.up.out_features // heads.num_heads)
            queries = LatentQueries(self._cut(queries.norm, heads), self._of_rows(queries.up, [rows]))
        return replace(
            latent,
            norm=self._cut(latent.norm, heads),
            down=self._of_rows(latent.down, [own, range(size, latent.down.out_features)]),
            queries=queries,
            latent_norm=self._cut(latent.latent_norm, heads),
            keys=self._rows(latent.keys, [self._rank.share(heads.num_heads)]),
        )

    def _rows_of(self, linear: Linear, heads: LayerHeads) -> list[range]:
        """The rank's rows of a layer: of each projection, also where a checkpoint has several in one tensor."""
        if linear.name == "qkv":
            sizes = [(heads.q_size, heads.head_dim), *[(heads.kv_size, heads.head_dim)] * 2]
        elif linear.name.endswith("gate_up"):
            sizes = [(linear.out_features // 2, 1)] * 2
        else:
            sizes = [(each.out_features, 1) for each in linear.merged_from]
        return self._shares([each for each in sizes if each[0]])

    def _shares(self, sizes: Sequence[tuple[int, int]]) -> list[range]:
        rows, first = [], 0
        for size, unit in sizes:
            own = self._rank.share(size, unit)
            rows.append(range(first + own.start, first + own.stop))
            first += size
        return rows

    def _experts(self, linear: ExpertLinear) -> ExpertLinear:
        count = linear.num_experts
        if linear.name == "experts_down":
            columns = self._rank.share(linear.in_features)
            weight = self._columns_of(linear.weight, columns, linear.in_features)
            return replace(
                linear, in_features=len(columns), weight=weight, bias=linear.bias and self._added_once(linear.bias)
            )
        rows = self._shares([(linear.out_features // 2, 1)] * 2 * count)
        return replace(
            linear,
            out_features=sum(map(len, rows)) // count,
            weight=self._rows_of_all(linear.weight, rows),
            bias=linear.bias and self._rows(linear.bias, rows),
        )

    def _head_norms(self, norms: HeadNorms, heads: LayerHeads) -> HeadNorms:
        if norms.k is not None and norms.q.weight.data.shape == (heads.q_size,) and heads.num_heads > 1:
            own_q, own_k = (self._rank.share(size, heads.head_dim) for size in (heads.q_size, heads.kv_size))
            q = replace(norms.q, weight=self._rows(norms.q.weight, [own_q]))
            k = replace(norms.k, weight=self._rows(norms.k.weight, [own_k]))
            copies = self._rank.count * len(own_k) // heads.kv_size
            return SharedHeadNorms(q, k, 1, 1, None, (heads.q_size, heads.kv_size), copies)

        def of_heads(norm: Any, count: int) -> Any:
            if norm is None:
                return None
            weight = norm.weight
            share = self._rank.share(count)
            rows = [share] if weight.data.dim() == 2 else [range(len(weight.data))]
            changes: dict[str, Any] = {"weight": self._rows(weight, rows)}
            return replace(norm, **changes)

        num_heads, num_kv_heads = (len(self._rank.share(each)) for each in (norms.num_heads, norms.num_kv_heads))
        q, k = of_heads(norms.q, norms.num_heads), of_heads(norms.k, norms.num_kv_heads)
        return replace(norms, q=q, k=k, num_heads=num_heads, num_kv_heads=num_kv_heads)

    # The weight of a linear layer, in any format

    def _rows_of_all(self, weight: Part, rows: Sequence[range]) -> Part:
        """Some rows of each tensor of a weight; what belongs to projections, such as scales of inputs, stays."""
        if isinstance(weight, BlockFp8Weight):
            return self._rows_of_blocks(weight, rows)
        tensors = {name: each for name, each in _fields(weight).items() if isinstance(each, Parameter)}
        num_rows = max(len(each.data) for each in tensors.values())
        changes: dict[str, Any] = {
            name: self._rows(each, rows if len(each.data) == num_rows else [range(len(each.data))])
            for name, each in tensors.items()
        }
        return replace(weight, **changes, **_part_sizes(weight, rows))

    def _rows_of_blocks(self, weight: BlockFp8Weight, rows: Sequence[range]) -> BlockFp8Weight:
        """Blocks begin anew with each piece of the rows. Raises `ConfigError` for one that begins within a block."""
        height, blocks = weight.block_size[0], list[range]()
        first = first_block = 0
        for size in weight.part_sizes:
            for own in (each for each in rows if first <= each.start < first + size):
                begin, end = own.start - first, own.stop - first
                if begin % height or (end % height and end != size):
                    raise ConfigError(self._refusal(f"{weight.matrix.name} in blocks of {height} rows", own))
                blocks.append(range(first_block + begin // height, first_block - (-end // height)))
            first, first_block = first + size, first_block - (-size // height)
        matrix, scale = self._rows(weight.matrix, rows), self._rows(weight.scale, blocks)
        return replace(weight, matrix=matrix, scale=scale, part_sizes=tuple(map(len, rows)))

    def _columns_of(self, weight: Part, columns: range, in_features: int) -> Part:
        """The input features `columns` of each tensor of a weight, several of which may share an element.

        Raises `ConfigError` where they share it with other ranks.
        """
        changes: dict[str, Any] = {}
        for name, each in _fields(weight).items():
            if name == "order" and each is not None:
                raise ConfigError(self._refusal(f"{each.name}, an order of columns (act-order),", columns))
            is_of_rows = isinstance(each, Parameter) and each.data.shape[1:] in ((), (1,))  # the same for all columns
            if is_of_rows:
                changes[name] = self._rows(each, [range(len(each.data))])
            elif isinstance(each, Parameter):
                width = each.data.shape[1]
                if columns.start * width % in_features or columns.stop * width % in_features:
                    raise ConfigError(self._refusal(f"{each.name} with {width} columns for {in_features}", columns))
                begin, end = (each * width // in_features for each in (columns.start, columns.stop))
                changes[name] = self._columns(each, range(begin, end))
            elif name == "group_size" and each == in_features:
                changes[name] = len(columns)
        return replace(weight, **changes)

    def _refusal(self, what: str, own: range) -> str:
        return (
            f"dense.tensor_parallel_size is {self._rank.count}, but {what} cannot be cut at {own.start} and {own.stop}:"
            " set it to a smaller number"
        )

    # One tensor

    def _rows(self, whole: Parameter, rows: Sequence[range]) -> Parameter:
        """These rows, ascending."""
        made = self._made.get(id(whole.data))
        if made is not None:
            return Parameter(whole.name, made.data)
        sources, first = [], 0
        for source in whole.sources:
            own = [range(max(each.start, first), min(each.stop, first + source.num_rows)) for each in rows]
            own = [range(each.start - first, each.stop - first) for each in own if each]
            if own:
                pieces = tuple((each.start, each.stop) for each in own)
                sources.append(part_of(source, whole.data.shape[1:], TensorPart((pieces,))))
            first += source.num_rows
        return self._make(whole, (sum(map(len, rows)), *whole.data.shape[1:]), sources)

    def _columns(self, whole: Parameter, columns: range) -> Parameter:
        """All rows of these columns."""
        part = TensorPart((None, ((columns.start, columns.stop),)))
        sources = [part_of(source, whole.data.shape[1:], part) for source in whole.sources]
        return self._make(whole, (len(whole.data), len(columns)), sources)

    def _added_once(self, bias: Parameter) -> Parameter:
        """A bias of the first rank; zeros for all others, whose products are added to it."""
        if self._rank.index == 0:
            return self._rows(bias, [range(len(bias.data))])
        sources = [converted(source, (), torch.zeros_like) for source in bias.sources]
        return self._make(bias, tuple(bias.data.shape), sources)

    def _vocabulary(self, whole: Parameter) -> Parameter:
        """The rank's rows of the vocabulary, and zeros beyond its end."""
        made = self._made.get(id(whole.data))
        if made is not None:
            return Parameter(whole.name, made.data)
        own, num_rows = vocab_rows(len(whole.data), self._rank), len(whole.data)
        start, stop = min(own.start, num_rows), min(own.stop, num_rows)
        shape = (len(own), *whole.data.shape[1:])
        sources = []
        if stop > start and whole.sources:
            [source] = whole.sources
            sources.append(part_of(source, shape[1:], TensorPart((((start, stop),),))))
        if whole.sources and (num_missing := len(own) - (stop - start)):
            sources.append(zeros(num_missing, shape[1:]))
        return self._make(whole, shape, sources)

    def _make(self, whole: Parameter, shape: tuple[int, ...], sources: Sequence[Source]) -> Parameter:
        made = self._allocator.parameter(whole.name, *shape, sources=tuple(sources), dtype=whole.data.dtype)
        self._made[id(whole.data)] = made
        return made


def _fields(part: Any) -> dict[str, Any]:
    return {each.name: getattr(part, each.name) for each in fields(part)}


def _part_sizes(weight: Any, rows: Sequence[range]) -> dict[str, tuple[int, ...]]:
    """How many of the rows each projection has, for formats that ask."""
    if "part_sizes" not in _fields(weight):
        return {}
    return {"part_sizes": _overlaps(weight.part_sizes, rows)}


def _overlaps(part_sizes: Sequence[int], rows: Sequence[range]) -> tuple[int, ...]:
    """How many of the rows each of the parts has, one after the other."""
    sizes, first = [], 0
    for size in part_sizes:
        overlaps = (min(each.stop, first + size) - max(each.start, first) for each in rows)
        sizes.append(sum(max(0, each) for each in overlaps))
        first += size
    return tuple(sizes)
