"""The editors of logits that every sampler has. The folder is their list: whoever adds one adds a file.

A file has one `LogitsEditor`, with an `order`. Samplers apply editors of a lower order first;
`SamplingParams` documents the order of all options.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from services.dense_worker.sampling.logits_editor import LogitsEditor


def collect_editors(package: str, paths: Iterable[str]) -> tuple[type[LogitsEditor], ...]:
    """The editors of a package's modules, which are in the folders `paths`, in the order of application.

    Raises `ValueError` for a module that has not exactly one, and for two of the same order.
    """
    found: dict[int, type[LogitsEditor]] = {}
    for each in pkgutil.iter_modules(paths, f"{package}."):
        values = vars(importlib.import_module(each.name)).values()
        classes = [value for value in values if isinstance(value, type) and value.__module__ == each.name]
        editors = [value for value in classes if hasattr(value, "order")]
        if len(editors) != 1:
            raise ValueError(f"{each.name} has {len(editors)} classes with an order, must have 1")
        [editor] = editors
        if (other := found.setdefault(editor.order, editor)) is not editor:
            raise ValueError(f"{other.__name__} and {editor.__name__} both have the order {editor.order}")
    return tuple(found[order] for order in sorted(found))


EDITORS = collect_editors(__name__, __path__)
