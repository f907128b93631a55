"""Sends one generated corpus to the real TorchServe 0.12.0 and to torchere, and prints what differs.

    python tests/conformance/differential.py                     every configuration
    python tests/conformance/differential.py --only open         one of them
    python tests/conformance/differential.py --json out.json     all answers and differences, for a program
    python tests/conformance/differential.py --keep DIR          logs and answers stay there; TorchServe's own
                                                                 answers are taken from there when they are

Not collected by pytest: it needs Java 17 or newer, and TorchServe in `.peers/torchserve`, which
`tests/interop/real_torchserve.py --build-only` makes. The servers run one after the other, about five minutes
in all. Differences that `deviations.yaml` and docs/differences.md explain are only counted; exit code 1 when
there are others.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
from conformity.contrast import Answers, Difference, contrast
from conformity.deviations import deviations
from conformity.profiles import Profile, profiles
from conformity.rest import Case, send
from conformity.rpc import call
from conformity.servers import Server, torchere, torchserve
from conformity.store import build_store

ROOT = Path(__file__).resolve().parents[2]
PEER = ROOT / ".peers" / "torchserve"
READY_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    names = [profile.name for profile in profiles()]
    parser = argparse.ArgumentParser(description="Compare torchere's answers with TorchServe's.")
    parser.add_argument("--only", choices=names, help="one configuration")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all answers and differences there")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and answers there")
    options = parser.parse_args(argv)
    interop = ROOT / "tests" / "interop" / "real_torchserve.py"
    subprocess.run([sys.executable, str(interop), "--build-only"], check=True)
    with tempfile.TemporaryDirectory(prefix="torchere-differential-") as temporary:
        work = options.keep or Path(temporary)
        chosen = [profile for profile in profiles() if options.only in (None, profile.name)]
        pairs = {profile.name: _both(profile, work.resolve()) for profile in chosen}
    found = [one for name, (theirs, ours) in pairs.items() for one in contrast(name, theirs, ours)]
    status = report(found, sum(len(theirs.cases()) for theirs, _ in pairs.values()))
    if options.json is not None:
        document = {"torchserve and torchere": pairs, "differences": found}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(document)))
    return status


def _both(profile: Profile, work: Path) -> tuple[Answers, Answers]:
    """The answers of TorchServe and of torchere to everything of a configuration."""
    place = work / profile.name.replace(" ", "-")
    there, here = place / "torchserve", place / "torchere"
    kept = place / "torchserve.json"
    if kept.exists():
        theirs = msgspec.json.decode(kept.read_bytes(), type=Answers)
    else:
        running = torchserve(PEER, there, _store(there), profile.properties, profile.flags)
        theirs = _answers(profile, there, running)
        kept.write_bytes(msgspec.json.encode(theirs))
    return theirs, _answers(profile, here, torchere(here, _store(here), profile.properties, profile.flags))


def _store(place: Path) -> Path:
    store = place / "store"
    if not store.exists():
        store.mkdir(parents=True)
        build_store(store)
    return store


def _answers(profile: Profile, place: Path, running: AbstractContextManager[Server]) -> Answers:
    with running as server:
        print(f"{profile.name}: {place.name} is up", flush=True)
        keys = _keys(place)
        _wait_for_models(server, {"Authorization": f"Bearer {keys.get('inference', '')}"})
        answers = Answers()
        for record in profile.grpc():
            answers.grpc[record["name"]] = call(record, server.grpc)
        for case in _named_apart(profile.rest()):
            _ask(_with_keys(case, keys), server, answers)
        return answers


def _keys(place: Path) -> dict[str, str]:
    with suppress(FileNotFoundError):  # there is none where no token is asked for
        keys = json.loads((place / "key_file.json").read_text())
        return {name.lower(): entry["key"] for name, entry in keys.items()}
    return {}


def _with_keys(case: Case, keys: Mapping[str, str]) -> Case:
    if "Authorization" not in case.headers:
        return case
    return replace(
        case, headers={**case.headers, "Authorization": case.headers["Authorization"].format(**keys)}
    )


def _named_apart(cases: Iterator[Case]) -> Iterator[Case]:
    """The same cases; one that comes again gets a number."""
    seen: Counter[str] = Counter()
    for case in cases:
        seen[case.name] += 1
        again = seen[case.name] > 1
        yield replace(case, name=f"{case.name} ({seen[case.name]})") if again else case


def _wait_for_models(server: Server, headers: Mapping[str, str]) -> None:
    """Until the start-up models have answered once; what they answer does not matter here."""
    deadline_s = time.monotonic() + READY_S
    for model in ("probe", "rich"):
        case = Case("warm-up", "POST", f"/predictions/{model}", headers=headers, body=b"{}")
        while send(case, server.rest).status == 500:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{model} does not answer:\n{server.last_words()}")
            server.pace()


def _ask(case: Case, server: Server, answers: Answers) -> None:
    try:
        answers.rest[case.name] = send(case, server.rest)
    except (OSError, http.client.HTTPException) as err:
        answers.broken[case.name] = type(err).__name__  # the text differs with ports and lengths


def report(found: Sequence[Difference], total: int) -> int:
    """Print the differences that no section explains, and count the others; 1 when there is one to print."""
    table = deviations()
    explained: Counter[str] = Counter()
    groups: dict[str, list[Difference]] = defaultdict(list)
    for difference in found:
        section = table.section_for(f"{difference.profile}: {difference.case}", difference.lines)
        if section is None:
            groups[difference.kind].append(difference)
        else:
            explained[section] += 1
    print("\nexplained in docs/differences.md:")
    for section, count in explained.most_common():
        print(f"{count:5} {section}")
    for kind, members in sorted(groups.items(), key=lambda group: -len(group[1])):
        print(f"\n{len(members)} x {kind}")
        for member in members:
            print(f"   [{member.profile}] {member.case}")
            print("".join(f"       {line}\n" for line in member.lines[1:]), end="")
    unexplained = sum(map(len, groups.values()))
    same = total - len(found)
    print(
        f"\n{total} answers: {same} the same, {len(found) - unexplained} explained, {unexplained} unexplained"
    )
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
