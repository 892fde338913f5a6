"""The process that renders clients' chat templates, which gives each of them less CPU time."""

from __future__ import annotations

from services.gateway.text.client_templates import renderer

renderer.MAX_CPU_S /= 5

if __name__ == "__main__":
    renderer.main()
