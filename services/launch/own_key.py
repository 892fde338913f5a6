"""The launcher's own API key, if clients need one: new at each start, and known only to its gateways."""

from __future__ import annotations

import secrets

from services.common.config import Config, add_api_key, api_keys_of_environment

OWN_KEY_NAME = "twostroke-launcher"


def make_own_key(config: Config) -> str | None:
    """Adds a key for the gateways that this process will start and returns it; None if they require none."""
    if config.gateway.api_keys_file is None and not api_keys_of_environment():
        return None
    api_key = secrets.token_urlsafe(32)
    add_api_key(OWN_KEY_NAME, api_key)
    return api_key
