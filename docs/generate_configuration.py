"""Writes `docs/configuration.md` from `services/common/config.py`: `python docs/generate_configuration.py [FILE]`.

Sections, keys, types and defaults come from the code, descriptions from its docstrings and comments.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from services.common import config
from services.common.config import Config, Section, toml_value
from services.launch.flags import FLAGS, Flag

SOURCE = Path(config.__file__)
PAGE = Path(__file__).with_name("configuration.md")
EMBEDDED_MODEL = "deploy/models/tiny-llama"

INTRODUCTION = """# Configuration

This page is written by `make docs` from `services/common/config.py` and `services/launch/flags.py`: change it there.

One TOML file configures all services; each service reads it once, at its start, with `--config FILE`. `--set` replaces
one value of the file and may be repeated:

    python -m services.launch --config server.toml --set scheduler.max_num_seqs=128

    # server.toml
    [model]
    path = "/models/my-model"
    [gateway]
    address = "127.0.0.1:50051"

An unknown section or key, a value of a wrong type or an impossible combination ends the start with one line that
names it. A problem that only the model or the machine shows (a missing file, too many layers, a missing device) ends
the start with an error in the log.

Two environment variables hold secrets. `TWOSTROKE_API_KEYS` (`NAME=KEY,NAME=KEY`) gives the gateway API keys without a
file, and `TWOSTROKE_API_KEY` is the key that the chat client sends. The default "none" in the tables means that the
key is left out of the file.
"""

FLAGS_INTRODUCTION = """## Flags

Short forms of keys, for `twostroke serve` and `python -m services.launch`, most of them by the names that vLLM has. In
brackets stands what a word of vLLM is called here. Of a key that is set twice, `--set` wins over a flag, and a flag
over the file. An unknown flag is an error that names the nearest one. A switch is undone by `--no-` before its name.

| flag | values | key | |
|---|---|---|---|"""

TYPE_NAMES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "Path": "path",
    "Seconds": "seconds, more than 0",
    "Count": "integer, at least 1",
    "MessageBytes": "bytes, 1 to 2147483647",
    "LoraModule": "`NAME=DIRECTORY`",
    "SamplingOverride": "`NAME=NUMBER`",
    "ModelName": "string of 1 to 256 characters",
    "Device": "`auto`, `cpu`, `cuda` or `cuda:N`",
    "Gpu": "`cuda:N`",
    "Address": "`HOST:PORT` or `unix:PATH`",
    "TcpAddress": "`HOST:PORT`",
    "ZmqEndpoint": "`tcp://HOST:PORT` or `ipc://FILE`",
    "SocketAddress": "`unix:PATH`",
    "Target": "`HOST:PORT`, `unix:PATH`, `dns:///NAME:PORT` or `ipv4:HOST:PORT,...`",
    "Origin": "origin such as `https://app.example`, or `*`",
    "Proxy": "address, network or `unix`",
    "HostName": "host name without a port, or `*`",
    "RootPath": "path such as `/llm`, or nothing",
}
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than", "pattern": "of the form"}


def generate() -> str:
    """The page. Raises `ValueError` for a section or key without a description, or a type without a name."""
    text = SOURCE.read_text()
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    comments = _comments(text)
    parts = [INTRODUCTION]
    for name, section in Config():
        node = classes[type(section).__name__]
        description = ast.get_docstring(node)
        if description is None:
            raise ValueError(f"{node.name} has no docstring")
        lines = [f"## {name}", "", description, "", "| key | type | default | |", "|---|---|---|---|"]
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                lines.append(_row(f"{name}.{field.target.id}", field, section, comments))
        parts.append("\n".join(lines) + "\n")
    return "\n".join([*parts, FLAGS_INTRODUCTION, *map(_flag_row, FLAGS)]) + "\n"


def _row(name: str, field: ast.AnnAssign, section: Section, comments: dict[int, tuple[bool, str]]) -> str:
    key = name.partition(".")[2]
    cells = [f"`{key}`", _type_name(field.annotation), _default(getattr(section, key)), _description(field, comments)]
    if not cells[-1]:
        raise ValueError(f"{name} has no comment in {SOURCE.name}")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _flag_row(flag: Flag) -> str:
    values = f"`{flag.metavar}`" + (" ..." if flag.is_list else "")
    if isinstance(flag.values, Mapping):
        values = ", ".join(
            f"`{word}`" + ("" if word == value else f" (`{value}`)") for word, value in flag.values.items() if word
        )
    cells = [f"`{flag.name}`", values, ", ".join(f"`{key}`" for key in flag.keys), flag.help]
    return f"| {' | '.join(cells)} |"


def _comments(text: str) -> dict[int, tuple[bool, str]]:
    """By line number: whether the line holds only the comment, and the comment's text."""
    lines = text.splitlines(keepends=True)
    return {
        token.start[0]: (not token.line[: token.start[1]].strip(), token.string.removeprefix("#").strip())
        for token in tokenize.generate_tokens(iter(lines).__next__)
        if token.type == tokenize.COMMENT
    }


def _description(field: ast.AnnAssign, comments: dict[int, tuple[bool, str]]) -> str:
    """The comment lines right above, and the comment at the end of the field's own line."""
    words: list[str] = []
    line = field.lineno - 1
    while comments.get(line, (False, ""))[0]:
        words.insert(0, comments[line][1])
        line -= 1
    if field.end_lineno in comments:
        words.append(comments[field.end_lineno][1])
    return " ".join(words)


def _type_name(node: ast.expr) -> str:
    match node:
        case ast.BinOp(left=left, right=ast.Constant(value=None)):  # X | None
            return _type_name(left)
        case ast.BinOp(left=left, right=ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Constant(value=word))):
            return f"{_type_name(left)}; or `{word}`"
        case ast.Name(id=name) if name in TYPE_NAMES:
            return TYPE_NAMES[name]
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=choices)):
            *others, last = [f"`{choice.value}`" for choice in choices if isinstance(choice, ast.Constant)]
            return f"{', '.join(others)} or {last}"
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[element, *_])):
            return f"list: {_type_name(element)}"
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[base, ast.Call(keywords=bounds)])):
            return ", ".join([_type_name(base), *map(_bound, bounds)])
    raise ValueError(f"the type {ast.unparse(node)} has no name in {Path(__file__).name}")


def _bound(bound: ast.keyword) -> str:
    node = bound.value
    limit = getattr(config, node.id) if isinstance(node, ast.Name) else ast.literal_eval(node)
    return f"{BOUNDS[str(bound.arg)]} " + (f"`{limit}`" if isinstance(limit, str) else f"{limit:.15g}")


def _default(value: object) -> str:
    if value is None:
        return "none"
    if value == config.EMBEDDED_MODEL:
        return f'`"{EMBEDDED_MODEL}"`'
    return f"`{toml_value(value)}`"


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE).write_text(generate())
