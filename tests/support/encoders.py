"""Small random encoders in Hugging Face format, with a tokenizer of words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

VOCAB_SIZE = 90
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = tuple(f"w{i}" for i in range(VOCAB_SIZE - len(SPECIAL)))
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "pad_token_id": 1,
}


def make_encoder(
    path: Path,
    family: str,
    fields: dict[str, Any],
    num_labels: int = 0,
    classifier: Any = AutoModelForSequenceClassification,
) -> torch.nn.Module:
    """Writes config.json and safetensors of a random encoder, or of a classifier, and returns it.

    Norms and biases are random, too, so that a test notices a missing one.
    """
    config = AutoConfig.for_model(family, **fields, **({"num_labels": num_labels} if num_labels else {}))
    maker = classifier if num_labels else AutoModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = maker.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    model.save_pretrained(path)
    return model


def make_colbert(path: Path, fields: dict[str, Any], size: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """Writes a ColBERT of BERT's form, and returns BERT and the matrix behind it: float32 [size, hidden]."""
    model = make_encoder(path, "bert", fields)
    linear = torch.randn(size, fields["hidden_size"], generator=torch.Generator().manual_seed(6)) * 0.3
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors | {"linear.weight": linear}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    return model, linear


def make_bge_m3(path: Path, fields: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, torch.nn.Linear]]:
    """Writes an encoder of XLM-R's form with BGE-M3's layers for tokens, and returns it and these by name.

    About half of the tokens count.
    """
    model, size = make_encoder(path, "xlm-roberta", fields), fields["hidden_size"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        layers = {"sparse": torch.nn.Linear(size, 1), "colbert": torch.nn.Linear(size, size)}
    with torch.no_grad():
        layers["sparse"].weight.mul_(20)
        words = torch.arange(len(SPECIAL), VOCAB_SIZE)[None]
        layers["sparse"].bias.sub_(layers["sparse"](model(input_ids=words).last_hidden_state).median())
    for name, layer in layers.items():
        save_file(dict(layer.state_dict()), path / f"{name}_linear.safetensors")
    return model, layers


def add_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Writes a tokenizer of BERT's form: [CLS] a [SEP] b [SEP]. Its words are `WORDS`."""
    vocab = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocab[name]) for name in ("[CLS]", "[SEP]")],
    )
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]  # as of BERT's class
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names)
    saved.save_pretrained(path)
    return saved
