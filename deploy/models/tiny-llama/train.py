"""Trains the tiny Llama model of this folder from scratch, tokenizer included.

    python train.py --output-dir /tmp/tiny-llama

It takes about twenty minutes on one CPU core. The seed is fixed, so the same machine and library versions give
the same weights again.
"""

import argparse
import random
import time
from pathlib import Path
from typing import Any

import corpus
import tool_conversations
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 2
VOCAB_SIZE = 1024
MIN_MERGE_FREQUENCY = 3
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT)

MAX_POSITION_EMBEDDINGS = 2048
NUM_COPYING_STEPS = 450
COPIES_PER_STEP = 48
NUM_EPOCHS = 60
NUM_LAST_EPOCHS = 20
COPIES_PER_EPOCH = 48
MAX_COPIED_TOKENS = 24
MAX_BATCH_TOKENS = 2048
PEAK_LEARNING_RATE = 2e-3
LAST_PEAK_LEARNING_RATE = 8e-4
WARMUP_FRACTION = 0.05
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
MAX_GRADIENT_NORM = 1.0
IGNORED_LABEL = -100

Sample = tuple[list[int], list[int]]  # token ids and their labels, equally long


def main() -> None:
    """Trains and saves the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder that receives the model")
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # sums in the same order on any number of cores
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer()
    model = build_model(tokenizer)
    rng = random.Random(SEED)
    copies = [[encode_copy(tokenizer, rng) for _ in range(COPIES_PER_STEP)] for _ in range(NUM_COPYING_STEPS)]
    epochs = [copies, *(make_batches(tokenizer, rng) for _ in range(NUM_EPOCHS))]
    train_model(model, epochs, PEAK_LEARNING_RATE)
    model.to(torch.bfloat16).float()  # the second part learns from rounded weights, as they are saved
    rng = random.Random(SEED + 1)
    train_model(model, [make_batches(tokenizer, rng) for _ in range(NUM_LAST_EPOCHS)], LAST_PEAK_LEARNING_RATE)
    save(model, tokenizer, arguments.output_dir)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in which rare Chinese and Japanese characters take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=MIN_MERGE_FREQUENCY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.texts(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=(corpus.FOLDER / "chat_template.jinja").read_text(),
        model_max_length=MAX_POSITION_EMBEDDINGS,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 3 million random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def train_model(model: LlamaForCausalLM, epochs: list[list[list[Sample]]], peak_learning_rate: float) -> None:
    """AdamW with a warm-up and a cosine decay. Matrix products are computed in bfloat16.

    epochs: their batches. The very first epoch of the model only copies random tokens: else it would learn the cities
    and sums of its tool calls by heart. Copying appears after about 200 steps (Olsson et al. 2022, In-context Learning
    and Induction Heads).
    """
    num_steps = sum(len(batches) for batches in epochs)
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peak_learning_rate, total_steps=num_steps, pct_start=WARMUP_FRACTION, cycle_momentum=False
    )
    model.train()
    started_at = time.monotonic()
    for epoch, batches in enumerate(epochs, start=1):
        total_loss = 0.0
        for batch in batches:
            total_loss += train_step(model, batch, optimizer)
            schedule.step()
        seconds = time.monotonic() - started_at
        print(f"epoch {epoch}/{len(epochs)}  loss {total_loss / len(batches):.4f}  {seconds:.0f} s", flush=True)


def train_step(model: LlamaForCausalLM, batch: list[Sample], optimizer: torch.optim.Optimizer) -> float:
    """One update on one batch, padded on the right. Returns the loss."""
    token_ids, labels = collate(batch, model.config.pad_token_id)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=token_ids, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def make_batches(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[list[Sample]]:
    """One epoch: batches of samples of similar length, in random order."""
    samples = [encode_document(tokenizer, text) for text in corpus.load_documents()]
    samples += [encode_conversation(tokenizer, messages) for messages in corpus.conversations(rng)]
    samples += [encode_conversation(tokenizer, *sample) for sample in tool_conversations.epoch(rng)]
    samples += [encode_copy(tokenizer, rng) for _ in range(COPIES_PER_EPOCH)]
    samples.sort(key=lambda sample: len(sample[0]))

    batches: list[list[Sample]] = [[]]
    for sample in samples:
        num_padded_tokens = (len(batches[-1]) + 1) * len(sample[0])
        if batches[-1] and num_padded_tokens > MAX_BATCH_TOKENS:
            batches.append([])
        batches[-1].append(sample)
    rng.shuffle(batches)
    return batches


def encode_document(tokenizer: PreTrainedTokenizerFast, text: str) -> Sample:
    """Raw text from BOS to EOS. Every token after BOS is learned."""
    token_ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    return token_ids, [IGNORED_LABEL, *token_ids[1:]]


def encode_copy(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Sample:
    """A user's random tokens, which the answer repeats. Only the answer and its EOS are learned."""
    copied = [rng.randrange(len(SPECIAL_TOKENS), len(tokenizer)) for _ in range(rng.randint(4, MAX_COPIED_TOKENS))]
    bos, eos, user, assistant = tokenizer.convert_tokens_to_ids([BOS, EOS, USER, ASSISTANT])
    question = [bos, user, *copied, eos, assistant]
    return question + copied + [eos], [IGNORED_LABEL] * len(question) + copied + [eos]


def encode_conversation(
    tokenizer: PreTrainedTokenizerFast, messages: corpus.Conversation, tools: list[dict[str, Any]] | None = None
) -> Sample:
    """A conversation in the chat template. Only the answers with their calls, and their EOS, are learned."""
    token_ids = tokenizer.apply_chat_template(messages, tools=tools or None, return_dict=False)
    assistant_id = tokenizer.convert_tokens_to_ids(ASSISTANT)
    labels = []
    is_answer = False
    for token_id in token_ids:
        labels.append(token_id if is_answer else IGNORED_LABEL)
        if token_id == assistant_id:
            is_answer = True
        elif token_id == tokenizer.eos_token_id:
            is_answer = False
    return token_ids, labels


def collate(batch: list[Sample], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both int64 [batch_size, max_length], padded on the right."""
    token_ids = [torch.tensor(token_ids) for token_ids, _ in batch]
    labels = [torch.tensor(labels) for _, labels in batch]
    return (
        pad_sequence(token_ids, batch_first=True, padding_value=pad_token_id),
        pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL),
    )


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output_dir: Path) -> None:
    """Writes weights in bfloat16, configs and tokenizer in Hugging Face format."""
    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=False,
    )
    model.to(torch.bfloat16).save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)


if __name__ == "__main__":
    main()
