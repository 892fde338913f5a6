"""The folders of the gateway lie on floors, and no dialect knows another."""

from __future__ import annotations

from tests.support.imports import MODULES, imports_of

# From the ground up: each folder imports only those on lower floors.
FLOORS = [
    {"resources"},
    {"text", "features"},
    {"images"},
    {"request"},
    {"link"},
    {"access", "metrics"},
    {"adapters", "http"},
    {"core"},
    {"resume", "sound", "vectors"},
    {"apis"},
]
DIALECTS = {
    "anthropic", "audio", "cohere", "llama_cpp", "ollama", "openai", "responses", "server", "sglang", "tgi", "triton",
    "twostroke", "vectors",
}
GATEWAY, APIS = "services.gateway.", "services.gateway.apis."


def imports_within(prefix: str) -> dict[str, tuple[str, set[str]]]:
    """The modules below `prefix`, each with its folder or file there and what it imports of them."""
    names = {name for name in MODULES if name.startswith(prefix)}
    return {name: (name.removeprefix(prefix).split(".")[0], imports_of(name) & names) for name in names}


def test_each_folder_imports_only_those_below_it() -> None:
    floor_of = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}
    modules = imports_within(GATEWAY)
    assert floor_of.keys() <= {folder for folder, _ in modules.values()}
    wrong = [
        f"{name} imports {imported}"
        for name, (folder, imports) in modules.items()
        for imported in imports
        if folder in floor_of and modules[imported][0] != folder
        if modules[imported][0] not in floor_of or floor_of[modules[imported][0]] >= floor_of[folder]
    ]
    assert not wrong


def test_no_dialect_imports_another() -> None:
    modules = imports_within(APIS)
    joining = {"app", "invocations", "models", "same_paths"}  # all routes, and those at one path of several dialects
    assert {folder for folder, _ in modules.values()} == DIALECTS | {"shared"} | joining
    wrong = [
        f"{name} imports {imported}"
        for name, (folder, imports) in modules.items()
        for imported in imports
        if folder not in joining and modules[imported][0] not in (folder, "shared")
    ]
    assert not wrong
