"""Where pictures stand in the messages that are made of other APIs' blocks."""

from __future__ import annotations

from services.gateway.apis.shared.conversation import ASSISTANT, USER, Conversation


def test_pictures_stand_behind_the_texts_before_them() -> None:
    conversation = Conversation()
    conversation.add_picture(USER, "first")
    conversation.add_text(USER, "ab", "a")
    conversation.add_picture(USER, "second")
    conversation.add_picture(USER, "third")
    conversation.add_text(USER, "cde", "b")
    conversation.add_text(USER, "f", "c")
    conversation.add_picture(USER, "last")
    [message] = conversation.messages()
    assert message.content == "ab\ncde\nf"
    shown = [(each.url, message.content[: each.position]) for each in message.pictures]
    assert shown == [("first", ""), ("second", "ab"), ("third", "ab"), ("last", "ab\ncde\nf")]


def test_texts_of_the_assistant_are_joined_without_a_separator() -> None:
    conversation = Conversation()
    conversation.add_reply("ab")
    conversation.add_picture(ASSISTANT, "between")
    conversation.add_reply("c")
    [message] = conversation.messages()
    assert message.content == "abc"
    assert [each.position for each in message.pictures] == [2]
