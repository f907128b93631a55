"""A day of traffic through the HorizontalPodAutoscaler's algorithm: by `torchere_saturation`, and by CPU.

    python benchmarks/autoscaling.py [--seed 1] [--peak 300]

No recorded traffic is used: a seeded generator makes a daily curve with bursts. The pods are a fluid model in
steps of a second; the autoscaler follows Kubernetes' documentation (ratio, tolerance, pods without metrics,
stabilisation windows, policies). Printed for each way to scale: pod hours, mean and most replicas, changes,
refused requests, and the time in which requests waited for more than a second. A simulation shows which
settings are better than others, and not what a cluster will do.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

DAY_S = 86_400
# One pod.
RATE = 40.0  # requests a second: 4 executors, 0.1 s a request
QUEUE = 100  # requests that may wait
SERVER_S, READY_S = 6, 40  # from its creation until it answers scrapes, and until its models are loaded
WINDOW_S = 5  # of the saturation
LONGEST_S = 60  # over which a query may average it
# The way of a value to the autoscaler.
SCRAPE_S = 15  # between scrapes of Prometheus, or of metrics-server
SYNC_S = 15  # between decisions (--horizontal-pod-autoscaler-sync-period)
TOLERANCE = 0.1  # --horizontal-pod-autoscaler-tolerance


@dataclass(frozen=True)
class Policy:
    """A limit on changes within a period; the policy that allows the larger change counts."""

    period_s: int
    percent: float = 0.0
    pods: int = 0

    def allowed(self, replicas: int) -> int:
        """Return how many pods may be added to, or removed from, so many replicas."""
        return max(self.pods, math.ceil(replicas * self.percent / 100))


@dataclass(frozen=True)
class Scaling:
    """The settings of one autoscaler."""

    name: str
    target: float
    by_cpu: bool = False
    cpu_when_busy: float = 1.0  # CPU use, of its request, of a pod whose executors are all busy
    counts_starting: bool = True  # whether the saturation of pods whose models still load counts, as 1
    by_sum: bool = False  # KEDA: the autoscaler gets the sum over all pods, and divides it by the replicas
    window_s: int = WINDOW_S  # over which the saturation is averaged
    up_window_s: int = 0
    down_window_s: int = 300
    up: tuple[Policy, ...] = (Policy(30, percent=100),)
    down: tuple[Policy, ...] = (Policy(60, percent=25),)
    least: int = 2
    most: int = 20


def wanted(replicas: int, values: Sequence[float | None], target: float) -> int:
    """Return the replicas for the values of all pods; None: a pod without a value.

    Missing values count as 0 where the others ask for more replicas, and as the target where they ask for
    fewer; a change must hold with them, and exceed the tolerance.

    >>> wanted(4, [1.2] * 4, 0.8), wanted(4, [0.82] * 4, 0.8), wanted(4, [1.6, 1.6, None, None], 0.8)
    (6, 4, 4)
    """
    known = [value for value in values if value is not None]
    if not known:
        return replicas
    ratio = sum(known) / len(known) / target
    missing = len(values) - len(known)
    if not missing:
        return replicas if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * len(known))
    filled = sum(known) + (missing * target if ratio < 1 else 0.0)
    new_ratio = filled / len(values) / target
    if abs(new_ratio - 1) <= TOLERANCE or (ratio < 1) != (new_ratio < 1):
        return replicas
    count = math.ceil(new_ratio * len(values))
    turned = (new_ratio < 1 and count > replicas) or (new_ratio > 1 and count < replicas)
    return replicas if turned else count


def wanted_by_sum(replicas: int, total: float, target: float) -> int:
    """Return the replicas for an external metric with an average value: the share of each is the target.

    >>> wanted_by_sum(4, 4.8, 0.8), wanted_by_sum(4, 3.3, 0.8)
    (6, 4)
    """
    ratio = total / (target * replicas)
    return replicas if abs(ratio - 1) <= TOLERANCE else math.ceil(total / target)


class Autoscaler:
    """Windows and policies around `wanted` or `wanted_by_sum`."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self._wanted: deque[tuple[int, int]] = deque()  # second, replicas
        self._changes: deque[tuple[int, int]] = deque()  # second, pods added (or removed: negative)

    def decide(self, now_s: int, replicas: int, values: Sequence[float | None]) -> int:
        """Return the replicas from now on."""
        scaling = self._scaling
        if scaling.by_sum:
            total = sum(value for value in values if value is not None)
            count = wanted_by_sum(replicas, total, scaling.target)
        else:
            count = wanted(replicas, values, scaling.target)
        count = min(scaling.most, max(scaling.least, count))
        self._wanted.append((now_s, count))
        longest_s = max(scaling.up_window_s, scaling.down_window_s)
        while self._wanted[0][0] < now_s - longest_s:
            self._wanted.popleft()
        low = min(each for second, each in self._wanted if second >= now_s - scaling.up_window_s)
        high = max(each for second, each in self._wanted if second >= now_s - scaling.down_window_s)
        if low > replicas:
            chosen = min(low, max(self._limit(now_s, replicas, policy, 1) for policy in scaling.up))
        elif high < replicas:
            chosen = max(high, min(self._limit(now_s, replicas, policy, -1) for policy in scaling.down))
        else:
            return replicas
        if chosen != replicas:
            self._changes.append((now_s, chosen - replicas))
        return chosen

    def _limit(self, now_s: int, replicas: int, policy: Policy, sign: int) -> int:
        """Return the replicas that a policy allows: those at the beginning of its period, and its change."""
        recent = [change for second, change in self._changes if second > now_s - policy.period_s]
        begin = replicas - sum(change for change in recent if change * sign > 0)
        return begin + sign * policy.allowed(begin)


@dataclass
class Outcome:
    """The figures of a day."""

    pod_s: int = 0
    offered: int = 0
    refused: float = 0.0
    late_s: int = 0  # seconds in which a new request had to wait for more than a second
    most: int = 0
    changes: int = 0


@dataclass
class Pods:
    """All pods together: ready ones share the load evenly; the others start."""

    ages_s: list[int]
    queue: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque([0.0] * LONGEST_S, LONGEST_S))
    busy: deque[float] = field(default_factory=lambda: deque([0.0] * SCRAPE_S, SCRAPE_S))

    def step(self, arrivals: int) -> tuple[float, float]:
        """Serve for a second; return the refused requests and the seconds that a new one waits."""
        self.ages_s = [age_s + 1 for age_s in self.ages_s]
        ready = sum(age_s >= READY_S for age_s in self.ages_s)
        capacity, places = ready * RATE, ready * QUEUE
        served = min(capacity, self.queue + arrivals)
        rest = self.queue + arrivals - served
        self.queue = min(rest, places)
        refused = rest - self.queue
        busy = served / capacity if capacity else 1.0
        share = self.queue / places if places else 1.0
        self.busy.append(busy)
        self.recent.append(busy + min(1.0, max(share, refused / arrivals if arrivals else 0.0)))
        return refused, self.queue / capacity if capacity else 60.0

    def values(self, scaling: Scaling) -> list[float | None]:
        """Return the value of each pod, as the autoscaler reads it."""
        if scaling.by_cpu:  # a pod that starts is not ready, and its CPU does not count
            value = scaling.cpu_when_busy * sum(self.busy) / len(self.busy)
            return [value if age_s >= READY_S else None for age_s in self.ages_s]
        value = sum(list(self.recent)[-scaling.window_s :]) / scaling.window_s
        starting = 1.0 if scaling.counts_starting else None
        return [
            value if age_s >= READY_S else starting if age_s >= SERVER_S else None for age_s in self.ages_s
        ]

    def scale(self, replicas: int) -> None:
        """Create or remove pods; the youngest go first. Those that are removed answer what they have."""
        self.ages_s = sorted(self.ages_s, reverse=True)[:replicas]
        self.ages_s += [0] * (replicas - len(self.ages_s))


def day(seed: int, peak: float) -> list[int]:
    """Return the requests of each second: a daily curve with two humps, bursts, and Poisson's noise."""
    chance = random.Random(seed)
    bursts = [
        (chance.randrange(DAY_S), chance.randrange(60, 900), chance.uniform(0.3, 1.5)) for _ in range(16)
    ]
    rates = []
    for second in range(DAY_S):
        hour = second / 3600
        shape = 0.08 + 0.75 * math.exp(-(((hour - 11) / 2.6) ** 2)) + math.exp(-(((hour - 19.5) / 2.2) ** 2))
        rates.append(peak * shape)
    for start, length, strength in bursts:
        for second in range(start, min(DAY_S, start + length)):
            ramp = min(1.0, (second - start) / 20)  # within 20 s
            rates[second] += peak * strength * ramp * 0.4
    return [max(0, round(chance.gauss(rate, math.sqrt(rate)))) for rate in rates]


def run(scaling: Scaling, traffic: Sequence[int]) -> Outcome:
    """Replay a day."""
    pods, scaler, found = Pods([READY_S] * scaling.least), Autoscaler(scaling), Outcome()
    seen: list[float | None] = pods.values(scaling)
    for second, arrivals in enumerate(traffic):
        refused, wait_s = pods.step(arrivals)
        if second % SCRAPE_S == 0:
            seen = pods.values(scaling)
        if second % SYNC_S == SYNC_S // 2:
            count = len(pods.ages_s)
            values = seen[:count] + [None] * (count - len(seen))
            chosen = scaler.decide(second, count, values)
            found.changes += chosen != count
            pods.scale(chosen)
        found.offered += arrivals
        found.refused += refused
        found.late_s += wait_s > 1
        found.pod_s += len(pods.ages_s)
        found.most = max(found.most, len(pods.ages_s))
    return found


SATURATION = Scaling("saturation 0.8", 0.8)
BY_CPU = replace(SATURATION, by_cpu=True)
FAST = (Policy(15, percent=100, pods=4),)
CHART = Scaling("the chart's settings, by its HPA", 0.7, counts_starting=False, up=FAST)  # values.yaml
CONTENDERS = (
    *(replace(SATURATION, name=f"saturation {goal}", target=goal) for goal in (0.5, 0.6, 0.7, 0.8, 1.0)),
    *(
        replace(SATURATION, name=f"{goal}, loading pods left out", target=goal, counts_starting=False)
        for goal in (0.5, 0.6, 0.7, 0.8)
    ),
    *(
        replace(SATURATION, name=f"{goal}, mean of a minute", target=goal, window_s=LONGEST_S)
        for goal in (0.6, 0.7, 0.8)
    ),
    *(
        replace(SATURATION, name=f"{goal}, up by 4 pods or 100 % in 15 s", target=goal, up=FAST)
        for goal in (0.6, 0.7, 0.8)
    ),
    CHART,
    replace(CHART, name="the chart's settings, by KEDA's query", by_sum=True),
    replace(SATURATION, name="0.7, up after 30 s", target=0.7, up_window_s=30),
    replace(SATURATION, name="0.7, down after 60 s", target=0.7, down_window_s=60),
    replace(SATURATION, name="0.7, down after 900 s", target=0.7, down_window_s=900),
    *(replace(BY_CPU, name=f"CPU {goal:.0%}, used by the model", target=goal) for goal in (0.5, 0.7, 0.8)),
    *(
        replace(BY_CPU, name=f"CPU {goal:.0%}, model on a GPU", target=goal, cpu_when_busy=0.3)
        for goal in (0.2, 0.5, 0.8)
    ),
    replace(SATURATION, name="no autoscaler, 16 pods", least=16, most=16),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description="A day of traffic through the autoscaler's algorithm.")
    parser.add_argument("--seed", type=int, default=1, help="of the traffic (default: 1)")
    parser.add_argument("--peak", type=float, default=300.0, help="requests a second (default: 300)")
    asked = parser.parse_args(argv)
    traffic = day(asked.seed, asked.peak)
    print(f"{sum(traffic):,} requests, at most {max(traffic)} in a second; a pod serves {RATE:g} a second")
    print("| scaled by | pod hours | most pods | changes | refused | seconds with waits above 1 s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for scaling in CONTENDERS:
        found = run(scaling, traffic)
        refused = f"{found.refused / found.offered:.3%}"
        hours = found.pod_s / 3600
        print(
            f"| {scaling.name} | {hours:.0f} | {found.most} | {found.changes} | {refused} | {found.late_s} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
