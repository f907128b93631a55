"""A handler that keeps its executor busy for `WORK_S`, and counts the requests it began after their deadline.

A body is JSON: `{"until": T}`, T the deadline as seconds since 1970 on the same machine; `{"report": true}`
is answered with the counts so far and costs nothing. For batch size 1 and one executor.
"""

import json
import time

WORK_S = 0.008  # about what a small vision model takes


class TimedWork:
    """Answers `{"late": whether it began too late}`."""

    def __init__(self):
        self.begun = 0
        self.late = 0

    def initialize(self, context):
        """There is nothing to load."""

    def handle(self, data, context):
        """One request."""
        body = data[0].get("body") or data[0].get("data")
        request = json.loads(body) if isinstance(body, (bytes, bytearray)) else body
        if "report" in request:
            return [{"begun": self.begun, "late": self.late}]
        late = time.time() > request["until"]
        self.begun += 1
        self.late += late
        time.sleep(WORK_S)
        return [{"late": late}]
