"""A Ray cluster of two nodes on this machine, with the application of deploy/ray; obeys commands on standard input.

Usage: ray_cluster.py PORT OPTIONS, the latter as JSON. Each command is answered by a line of JSON on standard output:

    status        {"running": number of replicas that serve, "on": their number by node}
    kill          kills the process of one replica
    remove        ends the second node at once, with all that runs there
    deploy JSON   deploys the application anew, with other options
"""

import json
import os
import sys
from collections import Counter
from typing import Any

os.environ["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray import serve
from ray.cluster_utils import Cluster

from deploy.ray.application import Options, build

APPLICATION, NODE_CPUS = "default", 3
MAX_ATTEMPTS = 5


def add_node(cluster: Cluster, **options: Any) -> Any:
    """Ray gives a node half a minute to start, which may be too short for a busy machine."""
    for attempt in range(MAX_ATTEMPTS):
        try:
            return cluster.add_node(num_cpus=NODE_CPUS, object_store_memory=100 * 2**20, **options)
        except Exception as error:
            if attempt == MAX_ATTEMPTS - 1 or "timed out during startup" not in str(error):
                raise
    raise AssertionError("the last attempt raises")


def deploy(options: str) -> None:
    serve.run(build(Options.model_validate_json(options)), name=APPLICATION, blocking=False)


def servers() -> list[str]:
    """The names of the actors that are servers."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in named if each["name"].startswith(f"SERVE_REPLICA::{APPLICATION}#Server#")]


def status() -> dict[str, Any]:
    details = serve.status().applications[APPLICATION].deployments["Server"]
    return {"running": details.replica_states.get("RUNNING", 0), "states": dict(Counter(details.replica_states))}


def main() -> None:
    port, options = int(sys.argv[1]), sys.argv[2]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed
    cluster = Cluster()
    add_node(cluster, include_dashboard=False)
    second = add_node(cluster)
    ray.init(address=cluster.address, log_to_driver=True)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    deploy(options)
    print(json.dumps({"serving": True}), file=answers)
    try:
        for line in sys.stdin:
            command, _, argument = line.strip().partition(" ")
            found: dict[str, Any] = {}
            if command == "status":
                found = status()
            elif command == "kill":
                ray.kill(ray.get_actor(servers()[0], namespace="serve"))
            elif command == "remove":
                cluster.remove_node(second, allow_graceful=False)
            elif command == "deploy":
                deploy(argument)
            else:
                raise ValueError(command)
            print(json.dumps(found), file=answers)
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
