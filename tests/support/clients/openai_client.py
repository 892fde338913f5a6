"""OpenAI's client for a cluster with a Unix socket."""

from __future__ import annotations

import openai

from tests.support.clients.http_clients import client
from tests.support.cluster import Cluster


def openai_client(cluster: Cluster) -> openai.OpenAI:
    """It sends each request once."""
    http_client = client(cluster.http_address)
    return openai.OpenAI(api_key="none", base_url="http://gateway/v1", http_client=http_client, max_retries=0)
