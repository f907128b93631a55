"""Long JSON requests of tensors: time to decode one, and how long another thread waits for the GIL meanwhile.

    python benchmarks/long_json.py [--rounds 5] [--at-once]

`--at-once` decodes as is done with few items: an object for each element and list. Prints the medians of the
rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time

from torchere.handlers.tensors import list_text
from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.open_inference.json_request import parse_request

SIZE = 6_500_000  # just within the default max_request_size
ITEMS = {  # of data: an item, its shape, its datatype
    "floats": (b"0.123456789", b"", b"FP32"),
    "floats in lists": (b"[0.123456789,0.5]", b",2", b"FP32"),
    "small numbers": (b"1", b"", b"FP32"),
    "numbers in two lists each": (b"[[1]]", b",1,1", b"FP32"),
    "empty lists": (b"[]", b",0", b"FP32"),
    "texts": (b'"a"', b"", b"BYTES"),
    "lists of the wrong shape": (b"[[1]]", b",2", b"FP32"),
}
TICK_S = 0.0005


def body(item: bytes, sizes: bytes, datatype: bytes) -> bytes:
    """A request of one input whose data is `item` again and again."""
    count = SIZE // (len(item) + 1)
    head = b'{"inputs":[{"name":"x","datatype":"%b","shape":[%d%b],"data":[' % (datatype, count, sizes)
    return head + b",".join([item] * count) + b"]}]}"


def measured(text: bytes) -> tuple[float, float]:
    """Milliseconds of decoding a request, and the longest wait of another thread meanwhile."""
    over = threading.Event()
    waits = [0.0]

    def wait() -> None:
        while not over.is_set():
            began_s = time.perf_counter()
            time.sleep(TICK_S)
            waits.append(time.perf_counter() - began_s - TICK_S)

    thread = threading.Thread(target=wait)
    thread.start()
    began_s = time.perf_counter()
    try:
        parse_request(text, None)
    except InvalidRequest as err:
        err.__traceback__ = err.__cause__ = err.__context__ = None
    took_s = time.perf_counter() - began_s
    over.set()
    thread.join()
    return 1000 * took_s, 1000 * max(waits)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", action="store_true")
    options = parser.parse_args()
    if options.at_once:
        list_text.MANY_ITEMS = sys.maxsize
    sys.setswitchinterval(0.0005)  # as the server does
    print(f"{'data':28}{'decoded, ms':>14}{'longest wait, ms':>20}")
    for name, item in ITEMS.items():
        text = body(*item)
        took, waited = zip(*(measured(text) for _ in range(options.rounds)), strict=True)
        print(f"{name:28}{statistics.median(took):14.0f}{statistics.median(waited):20.0f}")


if __name__ == "__main__":
    main()
