"""Calls that a model writes as JSON: an object with name and arguments, or only the arguments after the name."""

from __future__ import annotations

import json
from collections.abc import Container

from services.gateway.text.tools.call_writer import CallWriter
from services.gateway.text.tools.json_scanner import WHITESPACE, JsonScanner, MalformedJson, State
from services.gateway.text.tools.tool import NAME
from services.gateway.text.tools.unfinished_value import unfinished_string

MAX_MEMBER_CHARACTERS = 256  # of the object's keys, and of its values other than the arguments
NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id")  # written by some models, ignored here


class MalformedCall(ValueError):
    """The text is not a call. `index` is that of the first wrong character."""

    def __init__(self, message: str, index: int = 0) -> None:
        super().__init__(message)
        self.index = index


class JsonArguments:
    """The arguments of one call, a JSON object. The call begins when its name and the object's beginning are known."""

    def __init__(self, writer: CallWriter, name: str | None) -> None:
        self._writer = writer
        self._scanner = JsonScanner()
        self._name = name
        self._held: list[str] = []  # the object's text, before the call begins
        self._num_seen = 0  # characters but white space, up to 2
        self.has_begun = False

    @property
    def is_complete(self) -> bool:
        return self._scanner.state is State.END

    def set_name(self, name: str) -> None:
        """The call's name, if it was not known before."""
        self._name = name
        self._write("")

    def cut(self) -> None:
        """Begins the call if its name is known: no more text comes."""
        if self._name is not None and not self.has_begun:
            self._begin()

    def feed(self, text: str, start: int = 0) -> int:
        """Takes `text` from `start` on, up to the object's end. Returns the index after it. Raises `MalformedCall`."""
        feed, shown, index = self._scanner.feed, [], start
        try:
            while index < len(text) and not self.is_complete:
                character = text[index]
                if not self._num_seen and character != "{" and character not in WHITESPACE:
                    raise MalformedJson("the arguments are not an object")
                if self._num_seen or character not in WHITESPACE:  # not before the object
                    shown.append(feed(character))
                    self._num_seen += self._num_seen < 2 and character not in WHITESPACE
                index += 1
        except MalformedJson as error:
            self._write("".join(shown))
            raise MalformedCall(str(error), index) from error
        self._write("".join(shown))
        return index

    def _write(self, text: str) -> None:
        if self.has_begun:
            self._writer.arguments(text)
            return
        self._held.append(text)
        if self._name is not None and self._num_seen == 2:
            self._begin()

    def _begin(self) -> None:
        self.has_begun = True
        self._writer.begin(self._name)
        self._writer.arguments("".join(self._held))


class JsonCall:
    """One call as an object: {"name": "f", "arguments": {...}}, in any order; `parameters` means `arguments`, and
    `function` the name: {"type": "function", "function": "f", "parameters": {...}}, as Llama 3.2 writes at times.

    Arguments may also be a string with the object's text, or missing.
    """

    def __init__(self, writer: CallWriter, names: Container[str] | None = None) -> None:
        """`names`: the only tools that may be called; the name must then come before the arguments."""
        self._writer = writer
        self._names = names
        self._scanner = JsonScanner()
        self._arguments: JsonArguments | None = None
        self._name: str | None = None
        self._key = ""
        self._member: list[str] | None = None  # the text of a key or value so far
        self._begun = False

    @property
    def is_complete(self) -> bool:
        return self._scanner.state is State.END

    @property
    def has_begun(self) -> bool:
        """Whether a delta of the call has been written."""
        return self._begun or (self._arguments is not None and self._arguments.has_begun)

    def feed(self, text: str, start: int = 0) -> int:
        """Takes `text` from `start` on, up to the call's end. Returns the index after it. Raises `MalformedCall`."""
        index = start
        while index < len(text) and not self.is_complete:
            if self._arguments is not None and not self._arguments.is_complete:
                index = self._arguments.feed(text, index)
                continue
            try:
                index += self._feed_one(text[index])
            except ValueError as error:
                raise MalformedCall(str(error), index) from error
        return index

    def cut(self) -> None:
        """Begins the call with the arguments so far if its name is known: no more text comes.

        Raises `MalformedCall`.
        """
        if self._name is None:
            return
        if self._arguments is None:
            self._arguments = JsonArguments(self._writer, self._name)
            if self._key in ARGUMENT_KEYS and self._member is not None and self._member[0] == '"':
                try:
                    self._feed_encoded(json.loads(unfinished_string("".join(self._member)) + '"'), is_whole=False)
                except ValueError as error:
                    raise MalformedCall(str(error)) from error
        self._arguments.cut()

    def _feed_one(self, character: str) -> int:
        """Takes one character. Returns 0 if it begins the arguments, which take it themselves, else 1."""
        scanner = self._scanner
        state, depth = scanner.state, scanner.depth
        if depth == 0 and character != "{":
            raise MalformedJson("the call is not an object")
        if depth == 1 and state is State.VALUE and character == "{" and self._key in ARGUMENT_KEYS:
            self._begin_arguments()
            scanner.feed('"')
            scanner.feed('"')  # an empty string stands for the whole object
            return 0
        shown = scanner.feed(character)
        if depth == 1 and state in (State.FIRST_KEY, State.KEY, State.VALUE) and character not in WHITESPACE + "}":
            self._member = []
        if self._member is not None:
            self._add(shown, is_key=depth == 1 and state in (State.FIRST_KEY, State.KEY, State.KEY_STRING))
        if self.is_complete:
            self._end()
        return 1

    def _add(self, shown: str, is_key: bool) -> None:
        """Adds a character to the key or value."""
        assert self._member is not None
        self._member.append(shown)
        is_long = not is_key and self._key in ARGUMENT_KEYS
        if len(self._member) > MAX_MEMBER_CHARACTERS and not is_long:
            raise MalformedJson(f"a key or value has more than {MAX_MEMBER_CHARACTERS} characters")
        # A number ends only with the character after it, which may be a comma or the end of the call.
        if self._scanner.depth <= 1 and self._scanner.state in (State.COLON, State.NEXT, State.KEY, State.END):
            member, self._member = "".join(self._member), None
            if is_key:
                self._key = json.loads(member)
                if self._key not in (*NAME_KEYS, *ARGUMENT_KEYS, *OTHER_KEYS):
                    raise MalformedJson(f"unexpected key {self._key[:60]!r}")
            elif self._key in NAME_KEYS:
                self._set_name(json.loads(member) if member.startswith('"') else None)
            elif self._key in ARGUMENT_KEYS and member.startswith('"'):
                self._begin_arguments()
                self._feed_encoded(json.loads(member))
            elif self._key in ARGUMENT_KEYS and member != "null":
                raise MalformedJson("the arguments are not an object")

    def _set_name(self, name: str | None) -> None:
        is_allowed = name is not None and NAME.fullmatch(name) and (self._names is None or name in self._names)
        if self._name is not None or not is_allowed:
            raise MalformedJson("the name is not a tool's")
        self._name = name
        if self._arguments is not None:
            self._arguments.set_name(name)

    def _begin_arguments(self) -> None:
        if self._arguments is not None or (self._names is not None and self._name is None):
            raise MalformedJson("arguments twice, or before the name")
        self._arguments = JsonArguments(self._writer, self._name)

    def _feed_encoded(self, text: str, *, is_whole: bool = True) -> None:
        """Takes arguments that were a string."""
        arguments = self._arguments
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise MalformedJson("the arguments have half a character") from error
        if arguments.feed(text) < len(text.rstrip(WHITESPACE)) or (is_whole and not arguments.is_complete):
            raise MalformedJson("the arguments are not one object")

    def _end(self) -> None:
        if self._name is None:
            raise MalformedJson("the call has no name")
        if self._arguments is None:
            self._begun = True
            self._writer.begin(self._name)
            self._writer.arguments("{}")
