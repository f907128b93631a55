"""Does what the buttons of torchserve-dashboard do, by the classes behind them, and runs its page once.

Runs in that program's environment. Arguments: the model store, a configuration file, a folder for logs, and
the management address. Prints each result as one JSON object.
"""

import contextlib
import io
import json
import sys
import time
from pathlib import Path

from torchserve_dashboard.api import LocalTS, ManagementAPI


def is_ready(api: ManagementAPI) -> bool:
    """Whether the worker is up; it is not listed before its start."""
    return [worker["status"] for worker in api.get_model("net")[0]["workers"]] == ["READY"]


def main() -> None:
    store, properties, logs, address = sys.argv[1:]
    server = LocalTS(store, properties, log_location=logs, metrics_location=f"{logs}/metrics")
    api = ManagementAPI(address)
    steps = {"version": server.check_version()[0], "start": server.start_torchserve()}
    deadline_s = time.monotonic() + 60
    while api.get_loaded_models() is None and time.monotonic() < deadline_s:
        time.sleep(0.2)
    steps["again"] = server.start_torchserve()
    steps["register"] = api.register_model("net.mar", initial_workers=1)
    while not is_ready(api) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    steps["describe"] = api.get_model("net", custom_metadata=True)
    steps["all"] = api.get_model("net", list_all=True)
    steps["default"] = api.change_model_default("net", "1.0")
    steps["scale"] = api.change_model_workers("net", min_worker=1, max_worker=2)
    steps["workflows"] = api.list_workflows()
    steps["page"] = page(store, properties, logs)
    steps["delete"] = api.delete_model("net", "1.0")
    steps["loaded"] = api.get_loaded_models()
    steps["stop"] = server.stop_torchserve()
    print(json.dumps(steps))


def page(store: str, properties: str, logs: str) -> str:
    """Run the script of the page outside a browser; returns its error, or ""."""
    import torchserve_dashboard

    script = Path(torchserve_dashboard.__file__).with_name("dash.py")
    flags = ["--model_store", store, "--config_path", properties, "--log_location", logs]
    sys.argv = [str(script), *flags, "--metrics_location", f"{logs}/metrics"]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
    except Exception as err:
        return f"{type(err).__name__}: {err}"
    return ""


main()
