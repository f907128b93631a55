"""The image's health check: asks HEALTH_URL, by http or https, or else the address in the configuration.

The status is 1 unless the answer is 200.
"""

import argparse
import http.client
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torchere.serving.commands.serve_options import LaunchRefused, config_file
from torchere.serving.commands.torchserve import pid_file, read_pid
from torchere.serving.config.properties import ConfigurationError, Entry, read_properties
from torchere.serving.config.resolve import configure

_TIMEOUT_S = 1.4  # twice that is below the time-out of HEALTHCHECK


def is_healthy(url: str) -> bool:
    """Return whether the server answers 200 at this address, or at the same one over TLS."""
    context = ssl.create_default_context()
    # It is asked by loopback, while its certificate is for the names that clients use.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # No proxy, whatever the variables of the container say.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    for each in dict.fromkeys((url, url.replace("http://", "https://", 1))):
        try:
            with opener.open(each, timeout=_TIMEOUT_S) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return False
        except (OSError, http.client.HTTPException):
            continue
    return False


def configured_url(environ: Mapping[str, str]) -> str:
    """Return the URL by the configuration file of the server: the default one if the file can't be read.

    A server with a pid file may have been started in another folder, with variables of its own.
    """
    words: list[str] = []
    with suppress(OSError):  # no server has a pid file, or not any more
        process = Path(f"/proc/{read_pid(pid_file(environ))}")
        words = os.fsdecode((process / "cmdline").read_bytes()).split("\0")
        variables = os.fsdecode((process / "environ").read_bytes()).split("\0")
        os.chdir(process / "cwd")
        environ = {**environ, **dict(each.split("=", 1) for each in variables if "=" in each)}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ts-config", "--ts_config")
    entries: tuple[Entry, ...] = ()
    with suppress(ConfigurationError, LaunchRefused):
        path = config_file(parser.parse_known_args(words)[0].ts_config, environ, use_snapshots=False)
        entries = read_properties(path) if path else ()
    return f"{configure(entries, environ).settings.inference_address}/livez"


if __name__ == "__main__":
    url = os.environ.get("HEALTH_URL") or configured_url(os.environ)
    sys.exit(0 if is_healthy(url) else 1)
