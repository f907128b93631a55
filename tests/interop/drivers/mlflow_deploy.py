"""Takes a model through mlflow-torchserve: create, list, get, update, predict, delete.

Runs in that program's environment, with `CONFIG_PROPERTIES` and `EXPORT_PATH` set; arguments: the weights,
and the handler. Prints each result as one JSON object.
"""

import json
import sys

import pandas
import torch
from mlflow.deployments import get_deploy_client


def _text(answer) -> str:
    return answer if isinstance(answer, str) else answer.to_json()


def main() -> None:
    weights, handler = sys.argv[1:]
    client = get_deploy_client("torchserve")
    steps = {
        "create": client.create_deployment("net", weights, config={"HANDLER": handler}),
        # As the plug-in has it, the second deployment of a name gets the next version.
        "again": client.create_deployment("net", weights, config={"HANDLER": handler, "VERSION": 2.0}),
        "update": client.update_deployment("net/2.0", config={"set-default": "true"}),
        "scale": client.update_deployment("net/2.0", config={"min_worker": 1, "synchronous": "true"}),
        "list": client.list_deployments(),
        "get": json.loads(client.get_deployment("net/all")["deploy"]),
        "tensor": _text(client.predict("net/2.0", torch.tensor([[1.0, 2.0]]))),
        "frame": _text(client.predict("net", pandas.DataFrame({"data": [[3.0, 4.0]]}))),
        "delete": client.delete_deployment("net/1.0"),
        "left": client.list_deployments(),
    }
    print(json.dumps(steps))


main()
