"""The image's health check: asks HEALTH_URL, by http or https; the status is 1 unless the answer is 200."""

import http.client
import os
import ssl
import sys
import urllib.error
import urllib.request

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


if __name__ == "__main__":
    sys.exit(0 if is_healthy(os.environ["HEALTH_URL"]) else 1)
