from model import NAME
from util import decorate

SEEN = []


def handle(data, context):
    if data is None:
        return None
    SEEN.append(NAME)
    return [decorate(",".join(sorted(set(SEEN))))] * len(data)
