"""Prints what an image is made of, as a CycloneDX document. It runs within the image, of which it needs Python alone:

    docker run --rm --interactive --network none --entrypoint python IMAGE - < deploy/docker/sbom.py > sbom.cdx.json

Components are the Python packages, with the licences that they state, and the packages of the Debian below.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

DEBIAN_FORMAT = "${db:Status-Abbrev}\t${Package}\t${Version}\t${Architecture}\n"


def python_components() -> list[dict[str, object]]:
    """The installed distributions, each once."""
    found = {}
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata
        name, version = re.sub(r"[-_.]+", "-", metadata["Name"]).lower(), distribution.version
        component: dict[str, object] = {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}@{quote(version)}",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name}@{quote(version)}",
        }
        if expression := metadata.get("License-Expression"):
            component["licenses"] = [{"expression": expression}]
        elif (stated := metadata.get("License")) and "\n" not in stated.strip():
            component["licenses"] = [{"license": {"name": stated.strip()}}]
        found[name] = component
    return [found[name] for name in sorted(found)]


def debian_components() -> list[dict[str, object]]:
    """The packages that are installed, none where there is no dpkg."""
    try:
        listed = subprocess.run(
            ["dpkg-query", "--show", f"--showformat={DEBIAN_FORMAT}"], capture_output=True, text=True, check=True
        ).stdout
    except FileNotFoundError:
        return []
    components = []
    for line in listed.splitlines():
        state, name, version, architecture = line.split("\t")
        if state.startswith("ii"):
            purl = f"pkg:deb/debian/{name}@{quote(version, safe='')}?arch={architecture}"
            components.append(
                {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
            )
    return components


def document(root: Path) -> dict[str, object]:
    """The whole document. `root`: where the server lies."""
    version = re.search(r'^VERSION = "(.+)"', (root / "services" / "__init__.py").read_text(), re.MULTILINE)
    assert version is not None
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": {"type": "container", "name": "twostroke", "version": version[1]},
        },
        "components": [*python_components(), *debian_components()],
    }


if __name__ == "__main__":
    json.dump(document(Path.cwd()), sys.stdout, indent=1)
