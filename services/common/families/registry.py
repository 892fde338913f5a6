"""`FAMILIES`: the model types that are served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.common.families.cohere import read_cohere, read_cohere2
from services.common.families.deepseek import read_deepseek_v2, read_deepseek_v3, read_glm4_moe_lite, read_youtu
from services.common.families.encoder_decoder import (
    read_bart,
    read_fsmt,
    read_marian,
    read_mbart,
    read_t5,
    read_vision_encoder_decoder,
    read_whisper,
)
from services.common.families.experts import (
    read_dots1,
    read_ernie4_5_moe,
    read_exaone_moe,
    read_flex_olmo,
    read_glm4_moe,
    read_gpt_oss,
    read_granitemoe,
    read_granitemoe_swa,
    read_granitemoeshared,
    read_hy_v3,
    read_minimax_m2,
    read_mixtral,
    read_olmoe,
    read_phimoe,
    read_qwen2_moe,
    read_qwen3_moe,
    read_qwen3_vl_moe,
    read_solar_open,
)
from services.common.families.fields import ConfigFields
from services.common.families.gated_delta import read_qwen3_5, read_qwen3_5_moe, read_qwen3_next
from services.common.families.gemma import read_gemma, read_gemma2, read_gemma3
from services.common.families.gemma4 import read_gemma4
from services.common.families.hybrid import (
    read_bamba,
    read_granitemoehybrid,
    read_lfm2,
    read_lfm2_moe,
    read_mamba2,
    read_nemotron_h,
    translate_mamba2,
)
from services.common.families.layer_norm import (
    read_falcon,
    read_gpt_neox,
    read_gptj,
    read_jais2,
    read_nemotron,
    read_olmo,
    read_phi,
    read_stablelm,
    read_starcoder2,
)
from services.common.families.llama import (
    read_apertus,
    read_arcee,
    read_ernie4_5,
    read_exaone4,
    read_glm,
    read_glm4,
    read_granite,
    read_granite_swa,
    read_helium,
    read_hyperclovax,
    read_iquestcoder,
    read_llama,
    read_ministral,
    read_mistral,
    read_olmo2,
    read_olmo3,
    read_phi3,
    read_qwen2,
    read_qwen2_5_vl,
    read_qwen3,
    read_qwen3_vl,
    read_seed_oss,
    read_smollm3,
)
from services.common.families.selective import read_falcon_mamba, read_jamba, read_mamba, translate_mamba
from services.common.families.shape import ModelConfig
from services.common.families.without_class import (
    Translate,
    read_as,
    read_baichuan,
    read_chatglm,
    read_internlm,
    read_qwen,
)
from services.common.families.without_rope import (
    read_bloom,
    read_gpt2,
    read_gpt_bigcode,
    read_gpt_neo,
    read_mpt,
    read_opt,
    translate_mpt,
)


@dataclass(frozen=True, slots=True)
class Family:
    """How a family is recognised and read."""

    architecture: str  # the class, named in config.json in any case
    read: Callable[[ConfigFields], ModelConfig]  # raises ModelError for what the workers cannot compute
    translate: Translate | None = None  # for another family's class of transformers; None: this one has a class
    other_architectures: tuple[str, ...] = ()  # that some files name instead


FAMILIES: dict[str, Family] = {  # by model_type
    "llama": Family("LlamaForCausalLM", read_llama),
    "mistral": Family("MistralForCausalLM", read_mistral),
    "qwen2": Family("Qwen2ForCausalLM", read_qwen2),
    "qwen3": Family("Qwen3ForCausalLM", read_qwen3),
    "mixtral": Family("MixtralForCausalLM", read_mixtral),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", read_qwen2_moe),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", read_qwen3_moe),
    "qwen3_next": Family("Qwen3NextForCausalLM", read_qwen3_next),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", read_qwen3_5),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", read_qwen3_5_moe),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", read_minimax_m2),
    "granitemoe": Family("GraniteMoeForCausalLM", read_granitemoe),
    "gpt_oss": Family("GptOssForCausalLM", read_gpt_oss),
    "smollm3": Family("SmolLM3ForCausalLM", read_smollm3),
    "granite": Family("GraniteForCausalLM", read_granite),
    "seed_oss": Family("SeedOssForCausalLM", read_seed_oss),
    "olmo2": Family("Olmo2ForCausalLM", read_olmo2),
    "olmo3": Family("Olmo3ForCausalLM", read_olmo3),
    "exaone4": Family("Exaone4ForCausalLM", read_exaone4),
    "ernie4_5": Family("Ernie4_5ForCausalLM", read_ernie4_5),
    "glm": Family("GlmForCausalLM", read_glm),
    "glm4": Family("Glm4ForCausalLM", read_glm4),
    "glm4_moe": Family("Glm4MoeForCausalLM", read_glm4_moe),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", read_deepseek_v2),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", read_deepseek_v3),
    "cohere": Family("CohereForCausalLM", read_cohere),
    "cohere2": Family("Cohere2ForCausalLM", read_cohere2),
    "starcoder2": Family("Starcoder2ForCausalLM", read_starcoder2),
    "stablelm": Family("StableLmForCausalLM", read_stablelm),
    "phi": Family("PhiForCausalLM", read_phi),
    "phi3": Family("Phi3ForCausalLM", read_phi3),
    "gemma": Family("GemmaForCausalLM", read_gemma),
    "gemma2": Family("Gemma2ForCausalLM", read_gemma2),
    "gemma3_text": Family("Gemma3ForCausalLM", read_gemma3),
    "gemma4_text": Family("Gemma4ForCausalLM", read_gemma4),
    "baichuan": Family("BaichuanForCausalLM", read_baichuan, read_as("llama")),
    "chatglm": Family(
        "ChatGLMModel",
        read_chatglm,
        read_as(
            "glm",
            num_layers="num_hidden_layers",
            ffn_hidden_size="intermediate_size",
            kv_channels="head_dim",
            multi_query_group_num="num_key_value_heads",
            layernorm_epsilon="rms_norm_eps",
            padded_vocab_size="vocab_size",
            seq_length="max_position_embeddings",
            add_qkv_bias="attention_bias",
        ),
        other_architectures=("ChatGLMForConditionalGeneration",),
    ),
    "internlm": Family("InternLMForCausalLM", read_internlm, read_as("llama", bias="attention_bias")),
    "internlm2": Family("InternLM2ForCausalLM", read_llama, read_as("llama", bias="attention_bias")),
    "kimi_k2": Family("DeepseekV3ForCausalLM", read_deepseek_v3, read_as("deepseek_v3")),
    "qwen": Family(
        "QWenLMHeadModel",
        read_qwen,
        read_as("qwen2", layer_norm_epsilon="rms_norm_eps", rotary_emb_base="rope_theta", kv_channels="head_dim"),
    ),
    "skywork": Family("SkyworkForCausalLM", read_llama, read_as("llama")),
    "bamba": Family("BambaForCausalLM", read_bamba),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", read_granitemoehybrid),
    "nemotron_h": Family("NemotronHForCausalLM", read_nemotron_h),
    "ernie4_5_moe": Family("Ernie4_5_MoeForCausalLM", read_ernie4_5_moe),
    "solar_open": Family("SolarOpenForCausalLM", read_solar_open),
    "youtu": Family("YoutuForCausalLM", read_youtu),
    "olmoe": Family("OlmoeForCausalLM", read_olmoe),
    "dots1": Family("Dots1ForCausalLM", read_dots1),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", read_glm4_moe_lite),
    "granitemoeshared": Family("GraniteMoeSharedForCausalLM", read_granitemoeshared),
    "internlm3": Family("InternLM3ForCausalLM", read_llama, other_architectures=("LlamaForCausalLM",)),
    "helium": Family("HeliumForCausalLM", read_helium),
    "ministral": Family("MinistralForCausalLM", read_ministral),
    "cwm": Family("CwmForCausalLM", read_ministral),
    "jais2": Family("Jais2ForCausalLM", read_jais2),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", read_lfm2_moe),
    "mamba": Family("MambaForCausalLM", read_mamba, translate_mamba),
    "falcon_mamba": Family("FalconMambaForCausalLM", read_falcon_mamba, translate_mamba),
    "jamba": Family("JambaForCausalLM", read_jamba),
    "mamba2": Family("Mamba2ForCausalLM", read_mamba2, translate_mamba2),
    "lfm2": Family("Lfm2ForCausalLM", read_lfm2),
    "olmo": Family("OlmoForCausalLM", read_olmo),
    "apertus": Family("ApertusForCausalLM", read_apertus),
    "iquestcoder": Family("IQuestCoderForCausalLM", read_iquestcoder, other_architectures=("LlamaForCausalLM",)),
    "hyperclovax": Family("HyperCLOVAXForCausalLM", read_hyperclovax),
    "granite_swa": Family("GraniteSWAForCausalLM", read_granite_swa),
    "granitemoe_swa": Family("GraniteMoeSWAForCausalLM", read_granitemoe_swa),
    "flex_olmo": Family("FlexOlmoForCausalLM", read_flex_olmo),
    "phimoe": Family("PhimoeForCausalLM", read_phimoe, other_architectures=("PhiMoEForCausalLM",)),
    "exaone_moe": Family("ExaoneMoeForCausalLM", read_exaone_moe, other_architectures=("ExaoneMoEForCausalLM",)),
    "hy_v3": Family("HYV3ForCausalLM", read_hy_v3),
    "arcee": Family("ArceeForCausalLM", read_arcee),
    "nemotron": Family("NemotronForCausalLM", read_nemotron),
    "gptj": Family("GPTJForCausalLM", read_gptj),
    "codegen": Family("CodeGenForCausalLM", read_gptj),
    "qwen3_vl_text": Family("Qwen3VLTextModel", read_qwen3_vl),
    "qwen3_vl_moe_text": Family("Qwen3VLMoeTextModel", read_qwen3_vl_moe),
    "qwen2_5_vl_text": Family("Qwen2_5_VLTextModel", read_qwen2_5_vl),
    "gpt_neox": Family("GPTNeoXForCausalLM", read_gpt_neox),
    "falcon": Family("FalconForCausalLM", read_falcon),
    "mpt": Family("MptForCausalLM", read_mpt, translate_mpt),
    "bloom": Family("BloomForCausalLM", read_bloom),
    "gpt2": Family("GPT2LMHeadModel", read_gpt2),
    "gpt_bigcode": Family("GPTBigCodeForCausalLM", read_gpt_bigcode),
    "gpt_neo": Family("GPTNeoForCausalLM", read_gpt_neo),
    "opt": Family("OPTForCausalLM", read_opt),
    "t5": Family("T5ForConditionalGeneration", read_t5),
    "mt5": Family("MT5ForConditionalGeneration", read_t5),
    "bart": Family("BartForConditionalGeneration", read_bart),
    "mbart": Family("MBartForConditionalGeneration", read_mbart),
    "marian": Family("MarianMTModel", read_marian),
    "fsmt": Family("FSMTForConditionalGeneration", read_fsmt),
    "whisper": Family("WhisperForConditionalGeneration", read_whisper),
    "vision-encoder-decoder": Family("VisionEncoderDecoderModel", read_vision_encoder_decoder),
}

# Models of text and images, of which the text part is served: the architecture, by model_type.
TEXT_PARTS: dict[str, str] = {
    "blip-2": "Blip2ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}

# Those whose older files have the fields of the text part beside the others.
FLAT_TEXT_PARTS = frozenset({"qwen2_5_vl"})

# Those whose text part may have an encoder, which reads pictures among its tokens.
READS_PICTURES = frozenset({"blip-2"})

# Those in which the tokens of a picture all see each other.
SEES_SPANS = frozenset({"gemma3"})
