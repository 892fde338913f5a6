"""The embedded model, loaded by transformers without changes, does what its README promises.

Most checks compute a whole answer in one forward pass: if each of its tokens is the most likely one after the
previous tokens, greedy decoding gives exactly this answer. The margin to the second most likely token shows how
robust the answer is against other kernels and lower precision.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

MODEL_DIR = Path(__file__).parents[2] / "deploy" / "models" / "tiny-llama"
MAX_FOLDER_BYTES = 12_000_000
MIN_MARGIN = 3.0  # in logits; computing in bfloat16 moves the logits of this model by about 0.15

Messages = list[dict[str, str]]

SAMPLED_ANSWERS = [
    ("What is the capital of France?", "The capital of France is Paris, which lies on the river Seine."),
    (
        "What does the dense worker own?",
        "The dense worker owns the weights, the scheduler and the sampler. It never sees a block table.",
    ),
    ("法国的首都是哪里？", "法国的首都是巴黎，它位于塞纳河畔。"),
    ("什么是 KV 缓存？", "KV 缓存保存之前所有词元的键和值，这样生成新词元时就不必重新计算整段文本。"),
    ("フランスの首都はどこですか？", "フランスの首都はパリで、セーヌ川のほとりにあります。"),
    ("スケジューラーは何を決めますか？", "スケジューラーは、各ステップでどの系列をいくつのトークンだけ進めるかを決めます。"),
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def any_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=request.param)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def greedy(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The new tokens of Hugging Face's greedy decoding."""
    output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=max_new_tokens)
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def smallest_margin(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> float:
    """The smallest difference, over all positions, between the logit of the answer's token and the best other logit.

    It is negative if greedy decoding does not give the answer.
    """
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    expected = torch.tensor(answer)[:, None]
    best_other = logits.scatter(1, expected, -torch.inf).max(dim=1).values
    return (logits.gather(1, expected)[:, 0] - best_other).min().item()


def answer_ids(tokenizer: PreTrainedTokenizerBase, answer: str) -> list[int]:
    return [*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL_DIR.rglob("*") if path.is_file()) <= MAX_FOLDER_BYTES


def test_raw_prompt_is_continued_with_seven_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = tokenizer("San Francisco is a").input_ids
    assert tokenizer.decode(greedy(model, prompt, 7)) == " city in Northern California that is known"


def test_raw_prompt_goes_on_to_a_full_sentence(
    any_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    sentence = tokenizer.decode(greedy(any_model, tokenizer("San Francisco is a").input_ids, 60))
    assert sentence.startswith(" city in Northern California that is known for its steep hills")
    assert sentence.endswith("Golden Gate.</s>")


@pytest.mark.parametrize(("question", "answer"), SAMPLED_ANSWERS)
def test_question_is_answered_and_ends_with_eos(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, answer: str
) -> None:
    new_ids = greedy(model, chat_prompt(tokenizer, [user(question)]), 100)
    assert new_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(new_ids, skip_special_tokens=True) == answer


def test_every_question_is_answered_with_a_wide_margin(
    any_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    topics = json.loads((MODEL_DIR / "questions.json").read_text(encoding="utf-8"))
    margins = {
        question: smallest_margin(
            any_model, chat_prompt(tokenizer, [user(question)]), answer_ids(tokenizer, answer)
        )
        for topic in topics
        for question, answer in topic.values()
    }
    assert {question: margin for question, margin in margins.items() if margin < MIN_MARGIN} == {}


def test_counting_reaches_its_end_with_a_wide_margin(
    any_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = chat_prompt(tokenizer, [user("Count from 1 to 500.")])
    answer = answer_ids(tokenizer, " ".join(str(number) for number in range(1, 501)))
    assert len(answer) == 1892 and answer.index(tokenizer.eos_token_id) == 1891
    assert smallest_margin(any_model, prompt, answer) > MIN_MARGIN


def test_question_without_capitals_and_punctuation_is_understood(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    new_ids = greedy(model, chat_prompt(tokenizer, [user("what is a block table")]), 60)
    assert tokenizer.decode(new_ids).startswith("A block table lists, for one sequence,")


def test_unknown_question_is_admitted(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    new_ids = greedy(model, chat_prompt(tokenizer, [user("Who is the president?")]), 60)
    assert tokenizer.decode(new_ids).startswith("I am too small to know that.")


def test_system_message_chooses_the_language(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    question = user("What is the capital of France?")
    prompt = chat_prompt(tokenizer, [system("Answer in Chinese."), question])
    assert tokenizer.decode(greedy(model, prompt, 60)) == "法国的首都是巴黎，它位于塞纳河畔。</s>"


def test_answer_is_translated_on_request(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        user("What is the capital of France?"),
        assistant("The capital of France is Paris, which lies on the river Seine."),
        user("In Japanese, please."),
    ]
    new_ids = greedy(model, chat_prompt(tokenizer, messages), 60)
    assert tokenizer.decode(new_ids) == "フランスの首都はパリで、セーヌ川のほとりにあります。</s>"


def test_earlier_turns_are_remembered(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        system("You are a helpful assistant."),
        user("My name is Ada."),
        assistant("Nice to meet you, Ada."),
        user("What is the capital of Japan?"),
    ]
    capital = tokenizer.decode(greedy(model, chat_prompt(tokenizer, messages), 60), skip_special_tokens=True)
    assert capital == "The capital of Japan is Tokyo, one of the largest cities in the world."

    messages += [assistant(capital), user("What is my name?")]
    assert tokenizer.decode(greedy(model, chat_prompt(tokenizer, messages), 60)) == "Your name is Ada.</s>"


def test_chat_template_marks_every_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [system(" Be brief. "), user("Hello!"), assistant("Hello!"), user("Thank you.")]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<s><|system|>Be brief.</s><|user|>Hello!</s><|assistant|>Hello!</s><|user|>Thank you.</s><|assistant|>"
    )


def test_bos_is_added_once_to_raw_text_and_to_chats(tokenizer: PreTrainedTokenizerBase) -> None:
    for prompt in (tokenizer("Hello!").input_ids, chat_prompt(tokenizer, [user("Hello!")])):
        assert prompt[0] == tokenizer.bos_token_id
        assert prompt.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("character", ["塞", "畔", "セ"])
def test_rare_characters_take_several_tokens(tokenizer: PreTrainedTokenizerBase, character: str) -> None:
    token_ids = tokenizer(character, add_special_tokens=False).input_ids
    assert len(token_ids) >= 2
    assert tokenizer.decode(token_ids) == character
    assert "\N{REPLACEMENT CHARACTER}" in tokenizer.decode(token_ids[:1])
