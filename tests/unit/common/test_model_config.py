"""Model configs, compared with what transformers reads from the same config.json."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.common.errors import ModelError
from services.common.model_config import RopeConfig, load_model_config

SMALL = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WINDOW_OF_8 = {"sliding_window": 8, "use_sliding_window": True}
ROPE_CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-tuned": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 20,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "longrope": {
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 64,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def write_config(path: Path, family: str = "llama", **fields: Any) -> Path:
    """A directory with only a config.json; a field given as None is left out."""
    merged = {"model_type": family} | SMALL | fields
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))
    return path


def rope_scaling(rope_type: str, **changes: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": rope_type} | ROPE_CASES[rope_type] | changes}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("variant", [{}, {"head_dim": 32}, {"num_key_value_heads": 1}, {"tie_word_embeddings": True}])
def test_sizes_equal_the_parameters_transformers_builds(tmp_path: Path, family: str, variant: dict) -> None:
    path = write_config(tmp_path, family, **variant)
    config = load_model_config(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    assert config.family == family
    assert len(model.model.layers) == config.num_layers == len(config.sliding_windows)
    assert tuple(attention.q_proj.weight.shape) == (config.attn_size, config.hidden_size)
    assert tuple(attention.k_proj.weight.shape) == (config.num_kv_heads * config.head_dim, config.hidden_size)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert config.qkv_size == sum(projection.weight.shape[0] for projection in projections)
    assert tuple(mlp.up_proj.weight.shape) == (config.intermediate_size, config.hidden_size)
    assert tuple(model.lm_head.weight.shape) == (config.vocab_size, config.hidden_size)
    assert config.tie_word_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert config.norm_eps == model.model.norm.variance_epsilon
    assert config.head_dim == attention.head_dim == config.rope.rotary_dim


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_biases_and_head_norms_are_those_transformers_builds(tmp_path: Path, family: str, attention_bias: bool) -> None:
    path = write_config(tmp_path, family, attention_bias=attention_bias, mlp_bias=attention_bias)
    config = load_model_config(path)
    with torch.device("meta"):
        layer = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).model.layers[0]
    assert config.qkv_bias == (layer.self_attn.q_proj.bias is not None)
    assert config.o_bias == (layer.self_attn.o_proj.bias is not None)
    assert config.mlp_bias == (layer.mlp.down_proj.bias is not None)
    assert config.qk_norm == hasattr(layer.self_attn, "q_norm")


def frequencies(rope: RopeConfig, seq_len: int | None) -> tuple[torch.Tensor, float]:
    """The frequencies by the formulas of transformers, computed only from our RopeConfig."""
    parameters = dataclasses.asdict(rope) | {"rope_theta": rope.theta}
    config = SimpleNamespace(
        head_dim=rope.rotary_dim,
        hidden_size=rope.rotary_dim,
        num_attention_heads=1,
        max_position_embeddings=rope.max_position_embeddings,
        rope_parameters=parameters,
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[rope.rope_type](config, seq_len=seq_len)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type", "original_outside"])
@pytest.mark.parametrize("case", ROPE_CASES)
def test_rope_config_holds_all_that_the_frequencies_need(tmp_path: Path, case: str, spelling: str) -> None:
    rope_type, theta = case.split("-")[0], 5000.0
    if spelling == "rope_parameters":
        fields = {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta} | ROPE_CASES[case]}
    else:
        key = "type" if spelling == "type" else "rope_type"
        fields = {"rope_theta": theta, "rope_scaling": {key: rope_type} | ROPE_CASES[case]}
    if spelling == "original_outside":
        fields["original_max_position_embeddings"] = fields["rope_scaling"].pop("original_max_position_embeddings", 32)
    path = write_config(tmp_path, **fields)
    rope = load_model_config(path).rope
    assert (rope.rope_type, rope.theta, rope.max_position_embeddings) == (rope_type, theta, 256)
    if rope_type == "default":
        return
    truth = AutoConfig.from_pretrained(path)
    for seq_len in (None, 32, 300):  # None, and below and above the configured length
        expected, expected_scale = ROPE_INIT_FUNCTIONS[rope_type](truth, seq_len=seq_len)
        found, scale = frequencies(rope, seq_len)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert scale == expected_scale


def test_rope_theta_without_scaling_is_kept(tmp_path: Path) -> None:
    rope = load_model_config(write_config(tmp_path, rope_theta=1e6)).rope
    assert (rope.rope_type, rope.theta, rope.factor) == ("default", 1e6, 1.0)


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("llama", {"sliding_window": 8}, [None] * 4),
        ("mistral", {"sliding_window": 8}, [8] * 4),
        ("qwen2", {"sliding_window": 8}, [None] * 4),
        ("qwen2", WINDOW_OF_8 | {"max_window_layers": 1}, [None, 8, 8, 8]),
        ("qwen3", WINDOW_OF_8 | {"max_window_layers": 3}, [None, None, None, 8]),
        ("qwen2", WINDOW_OF_8 | {"layer_types": ["sliding_attention", "full_attention"] * 2}, [8, None] * 2),
    ],
)
def test_sliding_window_of_each_layer(tmp_path: Path, family: str, fields: dict, expected: list) -> None:
    path = write_config(tmp_path, family, **fields)
    assert list(load_model_config(path).sliding_windows) == expected
    assert list(load_model_config(path, num_layers=2).sliding_windows) == expected[:2]


def test_mistral_with_null_sliding_window_has_none(tmp_path: Path) -> None:
    config = {"model_type": "mistral", "sliding_window": None} | SMALL
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_config(tmp_path).sliding_windows == (None,) * 4


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 8], None, (7, 8)),
        (7, {"eos_token_id": [3, 4]}, (3, 4)),
        (7, {"eos_token_id": 3}, (3,)),
        (7, {"temperature": 0.5}, (7,)),
        (7, {"eos_token_id": None}, (7,)),
        (-1, None, ()),
    ],
)
def test_eos_comes_from_generation_config_first(
    tmp_path: Path, config_eos: Any, generation: dict | None, expected: tuple[int, ...]
) -> None:
    write_config(tmp_path, eos_token_id=config_eos)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_model_config(tmp_path).eos_token_ids == expected


def test_num_layers_cuts_the_model(tmp_path: Path) -> None:
    full = load_model_config(write_config(tmp_path))
    cut = load_model_config(tmp_path, num_layers=1)
    assert cut == dataclasses.replace(full, num_layers=1, sliding_windows=(None,))


def test_config_is_hashable_and_survives_pickling(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, **rope_scaling("longrope")))
    assert {config: 1}[pickle.loads(pickle.dumps(config))] == 1


def test_fingerprint_differs_for_any_other_model(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path / "a"))
    others = [
        load_model_config(write_config(tmp_path / "b", rope_theta=20000.0)),
        load_model_config(write_config(tmp_path / "c", "mistral", sliding_window=8)),
        load_model_config(tmp_path / "a", num_layers=1),
    ]
    assert load_model_config(write_config(tmp_path / "d")).fingerprint == config.fingerprint
    assert len({config.fingerprint, *(other.fingerprint for other in others)}) == 4


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, "float32"), ({"torch_dtype": "bfloat16"}, "bfloat16"), ({"dtype": "float16"}, "float16")],
)
def test_checkpoint_dtype_in_both_spellings(tmp_path: Path, fields: dict[str, str], expected: str) -> None:
    assert load_model_config(write_config(tmp_path, **fields)).checkpoint_dtype == expected


@pytest.mark.parametrize("num_layers", [0, -1, 5])
def test_num_layers_out_of_range_is_refused(tmp_path: Path, num_layers: int) -> None:
    with pytest.raises(ModelError, match=f"num_layers is {num_layers}, .* allows 1 to 4"):
        load_model_config(write_config(tmp_path), num_layers=num_layers)


def test_unknown_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no-such-model does not exist"):
        load_model_config(tmp_path / "no-such-model")


def test_directory_without_config_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("content", [b'{"model_type": "llama",', b"\xff\xfe\x00", b"[]", b"3"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_broken_json_names_the_file(tmp_path: Path, file: str, content: bytes) -> None:
    write_config(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match=file):
        load_model_config(tmp_path)


def test_directory_in_place_of_config_json_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)


UNUSABLE: list[tuple[str, dict[str, Any], str]] = [
    ("rwkv", {}, "'rwkv', supported: llama, mistral, qwen2, qwen3"),
    ("cogvlm", {}, "'cogvlm', of which transformers has no class, and code that comes with a model is never run$"),
    ("llama", {"model_type": None}, "None, supported: llama"),
    ("llama", {"model_type": ["llama"]}, "supported: llama"),
    ("llama", {"architectures": ["LlamaForQuestionAnswering"]}, "QuestionAnswering.*LlamaForCausalLM"),
    ("qwen3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0, which changes the computation"),
    ("llama", {"num_local_experts": 8}, "num_local_experts 8, which changes the computation.*'llama'"),
    ("llama", {"hidden_act": "mish"}, "'mish', supported: silu"),
    ("llama", {"quantization_config": {"quant_method": "aqlm"}}, "quant_method 'aqlm', supported: .*awq, gptq"),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4,.*num_key_value_heads 3"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads 0,"),
    ("qwen3", {"hidden_size": -64}, "hidden_size -64,"),
    ("qwen2", {"vocab_size": 0}, "vocab_size 0,"),
    ("qwen2", {"num_hidden_layers": 0}, "num_hidden_layers 0,"),
    ("llama", {"intermediate_size": "96"}, "intermediate_size '96',"),
    ("llama", {"max_position_embeddings": 2.5}, "max_position_embeddings 2.5,"),
    ("llama", {"max_position_embeddings": True}, "max_position_embeddings True,"),
    ("llama", {"hidden_size": 66}, "66"),
    ("mistral", {"hidden_size": 2}, "head_dim 0,"),
    ("llama", {"head_dim": 3}, "head_dim 3,"),
    ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps -1.0,"),
    ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps nan,"),
    ("llama", {"rms_norm_eps": "small"}, "small"),
    ("llama", {"architectures": 1}, "architectures 1, expected a list"),
    (
        "llama",
        {"intermediate_size": 10**18},
        "intermediate_size 1000000000000000000, expected",
    ),
    ("mistral", {"num_hidden_layers": 5000}, "num_hidden_layers 5000, expected a whole number from 1 to 4096"),
    ("mixtral", {"num_local_experts": 10**18}, "num_experts 1000000000000000000, expected"),
    ("llama", {"eos_token_id": "</s>"}, "</s>"),
    ("mistral", {"sliding_window": 0}, "sliding_window 0,"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window is off"),
    ("qwen2", {"layer_types": ["linear_attention"] * 4}, "linear_attention.*supported: full_attention"),
    ("qwen2", {"layer_types": ["full_attention"] * 3}, "3"),
    ("mixtral", {"num_local_experts": 0}, "num_experts 0, expected a whole number from 1 to"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9, expected at most its 8 experts"),
    ("mixtral", {"n_shared_experts": 1}, "n_shared_experts 1, supported: 0"),
    ("qwen3_moe", {"num_experts": 7, "num_local_experts": 8}, "num_experts 7, but also 8 experts"),
    ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok 0,"),
    ("qwen3_moe", {"moe_intermediate_size": -1}, "moe_intermediate_size -1,"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step 0,"),
    ("qwen3_moe", {"mlp_only_layers": [-1]}, r"mlp_only_layers \[-1\], expected a list of numbers of layers"),
    ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid', supported: softmax"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size 8, supported: 0"),
    ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm False, supported: True"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0,"),
    ("qwen2_moe", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window is off"),
    ("glm4_moe", {"n_routed_experts": 0}, "n_routed_experts 0,"),
    ("glm4_moe", {"n_group": 3}, "n_group 3, expected equal groups of at least 2 of its 128 experts"),
    ("glm4_moe", {"n_group": 128}, "n_group 128, expected equal groups of at least 2"),
    ("glm4_moe", {"n_group": 2, "topk_group": 3}, "topk_group 3, expected at most 2"),
    ("glm4_moe", {"n_group": 64}, "topk_group 1, .* enough for num_experts_per_tok 8"),
    ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace -1,"),
    ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func 'softmax', supported: sigmoid"),
    ("glm4_moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor 0.0, expected a number above 0"),
    ("llama", {"rope_scaling": {"type": "su", "factor": 2.0}}, "'su', supported: default, linear"),
    ("llama", {"rope_scaling": "yarn"}, "yarn"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor 0,"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor '2',"),
    ("llama", rope_scaling("longrope", short_factor=[1]), "8 numbers"),
    ("llama", rope_scaling("longrope", short_factor=["1"] * 8), "short_factor .*, expected 8 numbers above 0"),
    ("llama", rope_scaling("longrope", long_factor=[0] * 8), "long_factor .*, expected 8 numbers above 0"),
    ("llama", rope_scaling("longrope", original_max_position_embeddings=None), "no original_max_position_embeddings"),
    ("llama", rope_scaling("llama3", high_freq_factor=1), "low < high"),
    ("llama", rope_scaling("yarn", original_max_position_embeddings=0), "no valid llama config.json: division by zero"),
    ("llama", rope_scaling("longrope", original_max_position_embeddings=1), "embeddings 1, expected a number above 1"),
    ("llama", {"head_dim": 2} | rope_scaling("dynamic", factor=2.0), "'dynamic', and 2 rotated dimensions"),
    ("llama", {"rope_theta": -1.0}, "rope_theta -1.0,"),
    ("llama", {"rope_theta": 1}, "rope_theta 1, expected a number above 1"),
    ("llama", {"torch_dtype": "float33"}, "float33"),
    ("llama", {"dtype": "float64"}, "dtype 'float64', supported: float32, bfloat16, float16"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5, supported: 1.0"),
]


@pytest.mark.parametrize(("family", "fields", "message"), UNUSABLE)
def test_unusable_config_names_the_value(tmp_path: Path, family: str, fields: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        load_model_config(write_config(tmp_path, family, **fields))
    assert str(tmp_path) in str(error.value)


def test_unusable_eos_in_generation_config_is_named(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(ModelError, match="</s>"):
        load_model_config(tmp_path)


# Like the services, this program hides torch from transformers, which then imports much less for a config.json.
SERVICE = """
import sys
from pathlib import Path
from services.common.process import importing

with importing():
    from services.common.errors import ModelError
    from services.common.model_config import load_model_config
    from services.attn_worker.service import AttentionWorker
    from services.dense_worker.encoders.text.encoder_worker import EncoderWorker
    from services.dense_worker.service import DenseWorker
assert "transformers" not in sys.modules, "a worker whose model's shape is ready needs none"
for path in map(Path, sys.argv[1:]):
    try:
        print(load_model_config(path))
    except ModelError:
        print("refused")
assert "torch" in sys.modules and "torch._dynamo" not in sys.modules
"""


def test_a_service_reads_every_config_as_transformers_with_torch_does(tmp_path: Path) -> None:
    variants: list[tuple[str, dict[str, Any]]] = [(family, fields) for family, fields, _ in UNUSABLE]
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        variants += [(family, {"dtype": dtype}) for dtype in ("float32", "bfloat16", "float16")]
        variants += [(family, {"torch_dtype": "bfloat16"}), (family, WINDOW_OF_8)]
        variants += [
            (family, {"rope_scaling": {"rope_type": case.partition("-")[0]} | fields})
            for case, fields in ROPE_CASES.items()
        ]
    paths = [write_config(tmp_path / str(index), variant[0], **variant[1]) for index, variant in enumerate(variants)]
    expected = []
    for path in paths:
        try:
            expected.append(str(load_model_config(path)))
        except ModelError:
            expected.append("refused")
    command = [sys.executable, "-c", SERVICE, *map(str, paths)]
    repository = Path(__file__).parents[3]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60, cwd=repository)
    assert found.stdout.splitlines() == expected
    assert len(UNUSABLE) <= expected.count("refused") < len(expected) - 4 * 5
