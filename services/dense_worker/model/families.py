"""The model families: each function builds a model's parts from a `ModelConfig`. A new family is a function here."""

from __future__ import annotations

from collections.abc import Callable

from services.common.model_config import ModelConfig
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.model.head import Embedding, Head
from services.dense_worker.model.layer import DecoderLayer, NormedQkv, SequentialResidual
from services.dense_worker.model.linear import Cut, Linear, Projection
from services.dense_worker.model.mlp import GatedMlp
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.norm import HeadNorms
from services.dense_worker.model.parameters import Parameter, Source
from services.dense_worker.model.plain_weight import PlainWeight


def build_llama(config: ModelConfig, allocator: WeightAllocator) -> ModelWeights:
    """Llama, and families that differ from it only in biases and norms of heads: Mistral, Qwen2, Qwen3."""
    table = build_embedding_table(config, allocator)
    layers = (f"model.layers.{i}" for i in range(config.num_layers))
    return ModelWeights(
        Embedding(table),
        tuple(
            DecoderLayer(
                build_normed_qkv(config, allocator, layer),
                SequentialResidual(build_o(config, allocator, layer), build_gated_mlp(config, allocator, layer)),
            )
            for layer in layers
        ),
        build_head(config, allocator, table),
    )


BUILDERS: dict[str, Callable[[ModelConfig, WeightAllocator], ModelWeights]] = {  # by `ModelConfig.family`
    "llama": build_llama,
    "mistral": build_llama,
    "qwen2": build_llama,
    "qwen3": build_llama,
}


def build_embedding_table(config: ModelConfig, allocator: WeightAllocator) -> Parameter:
    """The embedding table, [vocab, hidden]."""
    sources = (Source("model.embed_tokens.weight", config.vocab_size),)
    return allocator.parameter("embed", config.vocab_size, config.hidden_size, sources=sources)


def build_normed_qkv(config: ModelConfig, allocator: WeightAllocator, layer: str) -> NormedQkv:
    """The first half of a layer; the names of its modules begin with `layer`."""
    attention = f"{layer}.self_attn"
    sizes = {"q_proj": config.attn_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
    merged = tuple(Projection(f"{attention}.{name}", size) for name, size in sizes.items())
    norm = allocator.norm("input_norm", f"{layer}.input_layernorm", config.hidden_size, config.rms_norm_eps)
    qkv = allocator.linear("qkv", config.hidden_size, merged, Cut.OUT, config.qkv_bias)
    head_norms = None
    if config.qk_norm:
        q_norm = allocator.norm("q_norm", f"{attention}.q_norm", config.head_dim, config.rms_norm_eps)
        k_norm = allocator.norm("k_norm", f"{attention}.k_norm", config.head_dim, config.rms_norm_eps)
        head_norms = HeadNorms(q_norm, k_norm, config.num_heads, config.num_kv_heads)
    return NormedQkv(norm, qkv, head_norms)


def build_o(config: ModelConfig, allocator: WeightAllocator, layer: str) -> Linear:
    """The projection of attention's output."""
    merged = (Projection(f"{layer}.self_attn.o_proj", config.hidden_size),)
    return allocator.linear("o", config.attn_size, merged, Cut.IN, config.o_bias)


def build_gated_mlp(config: ModelConfig, allocator: WeightAllocator, layer: str) -> GatedMlp:
    """The MLP and the norm before it."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    merged = tuple(Projection(f"{layer}.mlp.{name}", intermediate) for name in ("gate_proj", "up_proj"))
    down = (Projection(f"{layer}.mlp.down_proj", hidden),)
    return GatedMlp(
        allocator.norm("post_norm", f"{layer}.post_attention_layernorm", hidden, config.rms_norm_eps),
        allocator.linear("gate_up", hidden, merged, Cut.OUT, config.mlp_bias),
        allocator.linear("down", intermediate, down, Cut.IN, config.mlp_bias),
    )


def build_head(config: ModelConfig, allocator: WeightAllocator, table: Parameter) -> Head:
    """The final norm and the lm_head, which is the embedding's tensor if the two are tied."""
    merged = (Projection("lm_head", config.vocab_size),)
    norm = allocator.norm("final_norm", "model.norm", config.hidden_size, config.rms_norm_eps)
    if not config.tie_word_embeddings:
        weight = allocator.weight("lm_head", config.hidden_size, merged)
    else:
        weight = PlainWeight(Parameter("lm_head", table.data))
    return Head(norm, Linear("lm_head", config.hidden_size, config.vocab_size, merged, Cut.OUT, weight, None))
