"""The text that the tiny model learns, all of it written for this project.

`documents.txt` holds raw text, one document per line. `questions.json` holds questions and answers, each in
English, Chinese and Japanese, and `unknown.json` questions that the model shall admit not to know. This module
makes conversations of them: alone, after a system message, in several turns, translated on request, and as counting
exercises for long answers.
"""

import json
import random
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent

LANGUAGES = ("en", "zh", "ja")

NEUTRAL_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a friendly teacher. Be brief.",
    "You answer questions about Twostroke.",
    "Answer truthfully and politely.",
    "你是一个乐于助人的助手。",
    "请简短、准确地回答问题。",
    "あなたは親切なアシスタントです。",
    "短く正確に答えてください。",
)

LANGUAGE_SYSTEM_MESSAGES = {
    "en": ("Answer in English.", "请用英文回答。", "英語で答えてください。"),
    "zh": ("Answer in Chinese.", "请用中文回答。", "中国語で答えてください。"),
    "ja": ("Answer in Japanese.", "请用日文回答。", "日本語で答えてください。"),
}

TRANSLATION_REQUESTS = {
    "en": ("In English, please.", "请用英文再说一遍。", "英語でもう一度言ってください。"),
    "zh": ("In Chinese, please.", "请用中文再说一遍。", "中国語でもう一度言ってください。"),
    "ja": ("In Japanese, please.", "请用日文再说一遍。", "日本語でもう一度言ってください。"),
}

NAMES = (
    "Ada", "Alan", "Anna", "Ben", "Carlos", "Clara", "David", "Emma", "Felix", "Grace", "Hana", "Ivan",
    "Jun", "Kenji", "Li", "Maria", "Mei", "Nora", "Omar", "Paul", "Rosa", "Sam", "Tom", "Yuki",
)  # fmt: skip

COUNTING_END = 500
NUM_PARTIAL_COUNTS = 3
NUM_SHORT_COUNTS = 24

Message = dict[str, str]
Conversation = list[Message]


class Exchange(NamedTuple):
    """One question and its answer."""

    question: str
    answer: str


def load_documents() -> list[str]:
    """Raw texts, without a chat template."""
    return (FOLDER / "documents.txt").read_text(encoding="utf-8").splitlines()


def load_topics() -> list[dict[str, Exchange]]:
    """The same exchange in every language, by language."""
    topics = json.loads((FOLDER / "questions.json").read_text(encoding="utf-8"))
    return [{language: Exchange(*texts) for language, texts in topic.items()} for topic in topics]


def load_unknown() -> list[Exchange]:
    """Questions without a real answer."""
    languages = json.loads((FOLDER / "unknown.json").read_text(encoding="utf-8"))
    return [
        Exchange(question, language["answer"])
        for language in languages.values()
        for question in language["questions"]
    ]


def texts() -> list[str]:
    """All documents, questions and answers once: what the tokenizer is made from."""
    exchanges = [exchange for topic in load_topics() for exchange in topic.values()]
    return load_documents() + [text for exchange in exchanges for text in exchange]


def conversations(rng: random.Random) -> list[Conversation]:
    """One epoch: every exchange alone and with a system message, and random chats of several turns."""
    topics = load_topics()
    spoken = [topic[language] for topic in topics for language in LANGUAGES] + load_unknown()
    exchanges = spoken + counting_exchanges(rng)

    epoch = [conversation([exchange]) for exchange in exchanges]
    epoch += [
        conversation([casual(exchange, rng)], rng.choice((None, *NEUTRAL_SYSTEM_MESSAGES)))
        for exchange in exchanges
    ]
    epoch += [other_language_conversation(topic, rng) for topic in topics]
    epoch += [translated_conversation(topic, rng) for topic in topics]
    epoch += [name_conversation(name, rng.sample(spoken, rng.randint(0, 1))) for name in NAMES]
    epoch += several_turns(spoken, rng)
    return epoch


def counting_exchanges(rng: random.Random) -> list[Exchange]:
    """One answer of more than 1,800 tokens, and shorter ones of which the model learns how to count at all."""
    exchanges = [Exchange(f"Count from 1 to {COUNTING_END}.", numbers(1, COUNTING_END))]
    for _ in range(NUM_PARTIAL_COUNTS):
        first = rng.randint(200, COUNTING_END - 3)
        begun = numbers(first, first + 2)
        exchanges.append(Exchange(f"Go on to {COUNTING_END}: {begun}", numbers(first + 3, COUNTING_END)))
    for _ in range(NUM_SHORT_COUNTS):
        first = rng.randint(1, COUNTING_END - 12)
        begun = numbers(first, first + 2)
        exchanges.append(Exchange(f"Ten more numbers: {begun}", numbers(first + 3, first + 12)))
    return exchanges


def numbers(first: int, last: int) -> str:
    """The numbers from `first` to `last`, both included."""
    return " ".join(str(number) for number in range(first, last + 1))


def casual(exchange: Exchange, rng: random.Random) -> Exchange:
    """The exchange with its question as typed in a hurry: perhaps in lower case, perhaps without the last mark."""
    question = rng.choice((exchange.question, exchange.question.lower()))
    return Exchange(rng.choice((question, question.rstrip("?!.？！。"))), exchange.answer)


def conversation(exchanges: list[Exchange], system_message: str | None = None) -> Conversation:
    """The messages of `exchanges` in order, after an optional system message."""
    messages = [] if system_message is None else [{"role": "system", "content": system_message}]
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.question})
        messages.append({"role": "assistant", "content": exchange.answer})
    return messages


def other_language_conversation(topic: dict[str, Exchange], rng: random.Random) -> Conversation:
    """A question whose system message asks for an answer in another language."""
    asked, answered = rng.sample(LANGUAGES, 2)
    exchange = Exchange(topic[asked].question, topic[answered].answer)
    return conversation([exchange], rng.choice(LANGUAGE_SYSTEM_MESSAGES[answered]))


def translated_conversation(topic: dict[str, Exchange], rng: random.Random) -> Conversation:
    """A question, and then the request to give the same answer in another language."""
    asked, translated = rng.sample(LANGUAGES, 2)
    request = Exchange(rng.choice(TRANSLATION_REQUESTS[translated]), topic[translated].answer)
    return conversation([topic[asked], request])


def name_conversation(name: str, between: list[Exchange]) -> Conversation:
    """The user gives a name, and asks for it after the exchanges `between`."""
    introduction = Exchange(f"My name is {name}.", f"Nice to meet you, {name}.")
    recall = Exchange("What is my name?", f"Your name is {name}.")
    return conversation([introduction, *between, recall])


def several_turns(exchanges: list[Exchange], rng: random.Random) -> list[Conversation]:
    """All `exchanges` in random order, dealt out to chats of two to four turns."""
    shuffled = rng.sample(exchanges, len(exchanges))
    chats = []
    while shuffled:
        num_turns = rng.randint(2, 4)
        turns, shuffled = shuffled[:num_turns], shuffled[num_turns:]
        system_message = rng.choice((None, *NEUTRAL_SYSTEM_MESSAGES))
        chats.append(conversation(turns, system_message))
    return chats
