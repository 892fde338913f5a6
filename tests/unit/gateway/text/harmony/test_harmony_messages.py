"""Conversations for Harmony's templates: each call with its result, and nothing that a template would leave out."""

from __future__ import annotations

from services.gateway.text.chat_message import Message, MessageCall
from services.gateway.text.harmony.messages import harmony_fields

A, B = MessageCall("a", "f", {"x": 1}), MessageCall("b", "g", {})
RESULT_A, RESULT_B = Message("tool", "1", call_id="a"), Message("tool", "2", call_id="b")


def shown(*messages: Message) -> list[tuple[str, str, str, list[str]]]:
    """Role, content, thinking and names of calls of each message for the template."""
    return [
        (
            each["role"],
            each["content"],
            each.get("thinking", ""),
            [call["function"]["name"] for call in each.get("tool_calls", ())],
        )
        for each in harmony_fields(messages)
    ]


def test_each_call_comes_right_before_its_result() -> None:
    calls = Message("assistant", "I look.", calls=(A, B), reasoning="Hm.")
    expected = [
        ("assistant", "", "Hm.\nI look.", ["f"]),
        ("tool", "1", "", []),
        ("assistant", "", "", ["g"]),
        ("tool", "2", "", []),
    ]
    assert shown(calls, RESULT_A, RESULT_B) == expected
    assert shown(calls, RESULT_B, RESULT_A) == expected


def test_results_and_calls_without_their_counterpart_stay() -> None:
    calls = Message("assistant", "", calls=(A, B))
    other = Message("tool", "3", call_id="c")
    assert [each[:2] for each in shown(calls, other, RESULT_B, Message("user", "So?"))] == [
        ("assistant", ""),
        ("assistant", ""),
        ("tool", "2"),
        ("tool", "3"),
        ("user", "So?"),
    ]


def test_results_of_equal_ids_go_to_the_calls_in_order() -> None:
    calls, again = Message("assistant", "", calls=(A, B, A)), Message("tool", "4", call_id="a")
    assert [each[:2] for each in shown(calls, RESULT_A, again, RESULT_B)] == [
        ("assistant", ""),
        ("tool", "1"),
        ("assistant", ""),
        ("tool", "2"),
        ("assistant", ""),
        ("tool", "4"),
    ]


def test_later_instructions_become_texts_of_the_user() -> None:
    given = (Message("system", "Be brief."), Message("user", "Hi"), Message("system", "Be kind."), Message("user", "?"))
    assert shown(*given) == [("system", "Be brief.", "", []), ("user", "Hi\nBe kind.\n?", "", [])]


def test_reasoning_has_the_name_of_the_template() -> None:
    assert shown(Message("assistant", "Four.", reasoning="Easy.")) == [("assistant", "Four.", "Easy.", [])]
