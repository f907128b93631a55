"""Runs torchx's component `serve.torchserve` on this machine, and prints the state that it ends in as JSON.

Arguments: an archive, the management address, and the port at which the component's application offers the
archive to the server. Runs in torchx's environment. (`torchx run` can't be given parameters of the type that
the component declares.)
"""

import json
import sys

from torchx.components.serve import torchserve
from torchx.runner import get_runner


def main() -> None:
    archive, address, port = sys.argv[1:]
    parameters = {"port": port, "model_name": "net", "initial_workers": 1, "synchronous": "true"}
    application = torchserve(model_path=archive, management_api=address, params=parameters)
    with get_runner() as runner:
        handle = runner.run(application, scheduler="local_cwd")
        status = runner.wait(handle, wait_interval=0.2)
        lines = "".join(runner.log_lines(handle, application.roles[0].name))
    print(json.dumps({"state": status.state.name, "log": lines}))


main()
