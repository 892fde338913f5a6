"""What a wheel has, beside the facts in pyproject.toml: the folders that serve, all below one package, `twostroke`.

In a checkout the packages are `services` and `bench`, names so general that another wheel may have them, too. In the
wheel the folder `twostroke` is what the root of the repository is in a checkout; `services/console/__main__.py` makes
it the place where Python finds them first. Dependencies and their versions stand in the requirements files alone.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
RUNTIME = "requirements.txt"
MODEL = "models/tiny-llama"
EXTRAS = ("tensorrt", "bench", "kv-events", "ray", "gguf", "modelscope", "docs")  # each has a file of requirements


def requirements(file: str) -> list[str]:
    """The requirements of a file and of those that it includes, without the ones of the server itself."""
    found = []
    for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r"):
            included = text.removeprefix("-r").strip()
            found += requirements(included) if included != RUNTIME else []
        elif text:
            found.append(text)
    return found


setup(
    install_requires=requirements(RUNTIME),
    extras_require={name: requirements(f"requirements-{name}.txt") for name in EXTRAS},
    package_dir={"twostroke": "."},
    packages=[
        "twostroke.services",
        *(f"twostroke.services.{name}" for name in find_namespace_packages("services", exclude=["*__pycache__*"])),
        "twostroke.bench",
        "twostroke.bench.load",
        "twostroke.deploy",
        "twostroke.deploy.ray",
    ],
    package_data={
        "twostroke.services.dense_worker.kernels.linear": ["*.cu"],
        "twostroke.services.dense_worker.kernels.stroke": ["*.cu"],
        "twostroke.services.gateway.apis.server.web_page": ["*.html", "*.css", "*.js"],
        "twostroke.services.pb": ["*.pyi"],
        "twostroke.deploy": [
            f"{MODEL}/{name}" for name in ("*config.json", "tokenizer.json", "*.safetensors", "*.jinja")
        ],
    },
)
