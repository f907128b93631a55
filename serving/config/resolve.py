"""Merges properties, environment and command line into `ServerSettings`, with one finding per value.

The first source that sets a key takes precedence: environment, command line, file, defaults. The environment
counts only if the file allows it (`enable_envvars_config=true`). All functions here are pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from torchere.archiver.errors import one_line
from torchere.serving.config.keys import KEYS, METRICS_API, NO_KEYSTORES, Key
from torchere.serving.config.kinds import BOOLEAN, INVERTED_BOOLEAN, MODELS, PATH, PATHS, near
from torchere.serving.config.model_properties import near_setting_of_models
from torchere.serving.config.properties import ConfigurationError, Entry, substitute
from torchere.serving.config.server_settings import Address, ServerSettings, SnapshotModel, SnapshotWorkflow

Level = Literal["effect", "warning", "error"]
COMMAND_LINE = "command line"
DEFAULTS = "default of torchserve"
_HIDDEN = "***"
_SECRET = re.compile(r"pass|secret|token|credential|private|(^|[_.-])key", re.IGNORECASE)  # keys to hide
_SIMILAR_VARIABLE = 0.85  # difflib's ratio; above that of TS_METRICS_PORT (a service's) to TS_METRICS_MODE
_SHOWN_CHARACTERS = 80  # longest value in a message; `models` may be long


@dataclass(frozen=True, slots=True)
class Finding:
    """The effect of one configuration value, or the problem with it."""

    level: Level
    source: str  # "line 3", "environment variable TS_...", "command line"
    key: str
    value: str  # the given value, shortened; "***" for a secret
    message: str
    line: int = 0  # line of the file; 0: another source

    def __str__(self) -> str:
        return f"{self.source}: {self.key}: {self.message}"


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings and all findings: those of the file in order, then of environment and command line.

    If a finding is an error, the settings contain the default instead of the invalid value.
    """

    settings: ServerSettings
    findings: tuple[Finding, ...]
    effective: tuple[tuple[str, str], ...] = ()  # key and text of each effective value, for snapshots

    def of_level(self, level: Level) -> tuple[Finding, ...]:
        """Return the findings of this level."""
        return tuple(finding for finding in self.findings if finding.level == level)

    def checked(self, origin: str = "configuration") -> ServerSettings:
        """Return the settings if no finding is an error.

        Raises:
            ConfigurationError: the configuration has errors; the message lists all of them, one per line.
        """
        if errors := self.of_level("error"):
            raise ConfigurationError("\n".join(f"{origin}: {error}" for error in errors))
        return self.settings


@dataclass(frozen=True, slots=True)
class _Given:
    """A value for a known key, from one source."""

    key: Key
    text: str
    source: str
    line: int = 0

    def finding(self, level: Level, message: str) -> Finding:
        shown = _HIDDEN if self.key.secret else _shown(self.key.kind.shown(self.text))
        return Finding(level, self.source, self.key.name, shown, one_line(message), self.line)


def configure(
    entries: Iterable[Entry] = (),
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> Configuration:
    """Merge the sources; `overrides` are the command line options, by the file's key names.

    `defaults` replace those of `ServerSettings`, and are not kept in snapshots.
    An invalid value raises nothing: it becomes a finding of level "error" (see `Configuration.checked`).
    """
    environ, entries = environ or {}, tuple(entries)
    findings: list[Finding] = []
    from_file = list(_known(entries, environ, findings))
    texts = {given.key.name: given.text for given in from_file}  # the last duplicate counts
    open_gates = {name for name, text in texts.items() if text.lower() == "true"}
    sources = (
        _from_environment(environ, open_gates, findings),
        [_Given(KEYS[name], text, COMMAND_LINE) for name, text in (overrides or {}).items()],
        from_file[::-1],  # the last duplicate first
    )
    findings += _misspelt_variables(environ, entries)
    winners: dict[str, _Given] = {}
    for given in (given for source in sources for given in source):
        if not given.text:
            findings.append(given.finding("effect", "empty, which counts as not set"))
            continue
        winner = winners.setdefault(given.key.name, given)
        if winner is not given:
            # A key twice in one file is a mistake; in two sources it is normal.
            level: Level = "warning" if given.line and winner.line else "effect"
            findings.append(given.finding(level, f"not used: {winner.source} counts"))
    for name, text in (defaults or {}).items():
        winners.setdefault(name, _Given(KEYS[name], text, DEFAULTS))
    values: dict[str, Any] = {}  # by setting
    for given in winners.values():
        findings += _take(given, values)
    models = winners.get("load_models")
    beside = models is not None and models.source == COMMAND_LINE  # they add to those of a snapshot
    findings += _contradictions(values, beside)
    settings = _build(values, beside)
    for check in (_open_management, _shut_out, _plain_grpc, _unused_certificate, _equal_addresses):
        findings += check(settings)
    findings.sort(key=lambda found: (not found.line, found.line, found.level))
    return Configuration(settings, tuple(findings), tuple(_effective(winners.values())))


# Keys that must be given at each start. A snapshot must not keep access that one command line granted.
_NOT_KEPT = ("load_models", "load_workflows", "model_snapshot", "tsConfigFile")
_NOT_KEPT_FROM_COMMAND_LINE = ("disable_token_authorization", "enable_model_api")


def _effective(winners: Iterable[_Given]) -> Iterator[tuple[str, str]]:
    for given in winners:
        name = given.key.name
        is_granted = given.source == COMMAND_LINE and name in _NOT_KEPT_FROM_COMMAND_LINE
        if not (given.key.secret or given.source == DEFAULTS or name in _NOT_KEPT or is_granted):
            yield name, _absolute(given)


def _absolute(given: _Given) -> str:
    """Return the text of a value, with absolute paths: a snapshot may be restored in another folder."""
    if given.key.kind is PATH:
        return str(Path(given.text).absolute())
    if given.key.kind is PATHS:
        return ",".join(str(Path(item.strip()).absolute()) for item in given.text.split(",") if item.strip())
    return given.text


def _known(entries: Iterable[Entry], environ: Mapping[str, str], findings: list[Finding]) -> Iterator[_Given]:
    """Yield the entries with a known key, with placeholders replaced; report unknown keys as findings."""
    for entry in entries:
        source = f"line {entry.line}"
        key = KEYS.get(entry.key)
        if key is None:
            name, message = _shown(entry.key), _unknown_key(entry.key)
            value = _HIDDEN if _SECRET.search(entry.key) else _shown(entry.value)
            findings.append(Finding("warning", source, name, value, message, entry.line))
            continue
        try:
            value = substitute(entry, environ)
        except ConfigurationError as err:
            findings.append(_Given(key, entry.value, source, entry.line).finding("error", str(err)))
            continue
        yield _stripped(_Given(key, value, source, entry.line), findings)


def _stripped(given: _Given, findings: list[Finding]) -> _Given:
    """Strip surrounding blanks; report a boolean that TorchServe would read as false because of them."""
    stripped = replace(given, text=given.text.strip())
    is_switch = given.key.kind in (BOOLEAN, INVERTED_BOOLEAN)
    if is_switch and stripped.text.lower() == "true" and stripped.text != given.text:
        message = "counts as true; TorchServe takes it for false, for the blanks around it"
        findings.append(stripped.finding("warning", message))
    return stripped


def _unknown_key(name: str) -> str:
    hint = near_setting_of_models(name) or near(name, KEYS)
    return "; ".join(filter(None, ["unknown key, not used", hint]))


def _from_environment(
    environ: Mapping[str, str], open_gates: set[str], findings: list[Finding]
) -> Iterator[_Given]:
    for key in KEYS.values():
        if not key.variable or key.variable not in environ:
            continue
        given = _Given(key, environ[key.variable], f"environment variable {key.variable}")
        closed = [gate for gate in key.gates if gate not in open_gates]
        if closed:
            findings.append(given.finding("warning", f"not used: the file must say {closed[0]}=true"))
        else:
            yield _stripped(given, findings)


def _misspelt_variables(environ: Mapping[str, str], entries: Sequence[Entry]) -> Iterator[Finding]:
    """Yield warnings on unknown `TS_` variables with names like those of keys, unless the file uses them.

    Other unknown variables are ignored: Kubernetes sets `TS_SERVICE_HOST` and more for a service called `ts`.
    """
    variables = [key.variable for key in KEYS.values() if key.variable]
    for name in environ:
        if not name.startswith("TS_") or name in variables:
            continue
        key = name.removeprefix("TS_").lower()
        if key not in KEYS:
            message = near(name, variables, _SIMILAR_VARIABLE)
        else:
            variable = KEYS[key].variable
            message = f"did you mean {variable}?" if variable else "counts in the file only"
        if message and not any(f"$${name}$$" in entry.value for entry in entries):
            yield Finding("warning", f"environment variable {name}", key, _HIDDEN, f"not used; {message}")


def _take(given: _Given, values: dict[str, Any]) -> Iterator[Finding]:
    """Parse the value of a key that takes precedence, and set it in `values`; yield findings."""
    key = given.key
    try:
        value = key.kind.read(given.text)
    except ValueError as err:
        yield _unreadable(given, err)
        return
    if key.kind.remark and (remark := key.kind.remark(given.text)):
        yield given.finding("warning", remark)
    if key.setting:
        values[key.setting] = value
        yield given.finding("effect", f"{key.setting} = {_shown_value(value, key.kind.shown)}")
    elif key.advice and given.text.lower() != key.no_advice_for:
        yield given.finding("warning", f"has no effect: {key.advice}")
    else:
        yield given.finding("effect", "accepted")


def _unreadable(given: _Given, err: ValueError) -> Finding:
    message = str(err) or f"found {_shown(given.text)!r}"
    if ", expected " not in message:  # otherwise the message already names the wrong member
        message = f"{message}, expected {given.key.kind.expected}"
    if given.key.lenient:
        return given.finding("warning", f"{message}; the default stays")
    return given.finding("error", message)


def _contradictions(values: Mapping[str, Any], beside: bool) -> Iterator[Finding]:
    """Yield findings on keys that require or exclude each other."""
    if "snapshot_models" in values:
        yield from _beside_snapshot(values, beside)
    yield from _about_keys(values)
    yield from _about_signing(values)
    yield from _about_sandbox(values)
    tls_files = [values.get("certificate_file"), values.get("private_key_file")]
    if all(tls_files):
        return
    needing = [name for name in _REST_ADDRESSES if (address := values.get(name)) and address.tls]
    needing += ["enable_grpc_ssl"] if values.get("grpc_tls_enabled") else []
    needing += ["client_ca_file"] if values.get("client_ca_file") else []
    if any(tls_files):
        needing = ["certificate_file" if tls_files[0] else "private_key_file"]
    if needing:
        message = f"TLS needs both certificate_file and private_key_file (PEM); set them. {NO_KEYSTORES}"
        yield Finding("error", "configuration", ", ".join(needing), "", message)


def _beside_snapshot(values: Mapping[str, Any], beside: bool) -> Iterator[Finding]:
    for kind in ("models", "workflows"):
        key = f"load_{kind}"
        if not values.get(key):
            continue
        message = f"not used: model_snapshot is there, and lists the {kind} to load"
        if beside and kind == "models":
            message = "loaded after the models of model_snapshot, unless it holds them (--ncs: these alone)"
        yield Finding("warning", "configuration", key, _shown_value(values[key], MODELS.shown), message)


def _about_keys(values: Mapping[str, Any]) -> Iterator[Finding]:
    fixed, client_ca = values.get("token_keys_file"), values.get("client_ca_file")
    takes_tokens = values.get("token_auth_enabled", True)
    if client_ca is not None and fixed is None:
        message = "token_keys_file is missing, which says what the subjects of client certificates may do"
        yield Finding("error", "configuration", "client_ca_file", _shown_value(client_ca), message)
    if values.get("metrics_authorization") and (takes_tokens or client_ca) and fixed is None:
        message = "the keys that a server makes have no role metrics; name keys in token_keys_file"
        yield Finding("error", "configuration", "metrics_authorization", "true", message)
    if values.get("metrics_authorization") and not (takes_tokens or client_ca):
        message = "not used: disable_token_authorization switches keys off"
        yield Finding("warning", "configuration", "metrics_authorization", "true", message)
    if fixed is None:
        return
    written = values.get("key_file", ServerSettings().key_file)
    if fixed.absolute() == written.absolute() or fixed.absolute() == Path("key_file.json").absolute():
        message = "servers write this file, and `torchserve --stop` deletes it; use another name"
        yield Finding("error", "configuration", "token_keys_file", _shown_value(fixed), message)
    elif "key_file" in values:
        message = "not used: token_keys_file is there, and the server makes no keys"
        yield Finding("warning", "configuration", "key_file", _shown_value(written), message)
    if not takes_tokens and client_ca is None:
        message = "not used: disable_token_authorization switches keys off"
        yield Finding("warning", "configuration", "token_keys_file", _shown_value(fixed), message)


def _about_signing(values: Mapping[str, Any]) -> Iterator[Finding]:
    trusted = values.get("trusted_signing_keys")
    if values.get("require_signed") and not trusted:
        message = "no signer is trusted; set trusted_signing_keys to PEM files of public keys, or of a CA"
        yield Finding("error", "configuration", "require_signed", "true", message)
    elif trusted and not values.get("require_signed"):
        message = "not used: signatures are verified with require_signed=true only"
        yield Finding("warning", "configuration", "trusted_signing_keys", _shown_value(trusted), message)


def _about_sandbox(values: Mapping[str, Any]) -> Iterator[Finding]:
    level = values.get("sandbox.level", ServerSettings().sandbox.level)
    for key in ("network", "read_paths"):
        if f"sandbox.{key}" in values and level != "strict":
            message = (
                "not used: only worker_sandbox=strict restricts the network and the files of workers, and "
                f"it is {level}"
            )
            yield Finding("warning", "configuration", f"worker_{key}", "", message)


def _shut_out(settings: ServerSettings) -> Iterator[Finding]:
    """Yield findings on listeners that no client could call: they take certificates only, and have no TLS."""
    if settings.client_ca_file is None or settings.token_auth_enabled:
        return
    addresses = {
        "inference_address": settings.inference_address,
        "management_address": settings.management_address,
    }
    without = [name for name, address in addresses.items() if not address.tls]
    without += [] if settings.grpc_tls_enabled else ["enable_grpc_ssl"]
    for name in without:
        message = "without TLS no client can show a certificate, and tokens are off: every call is refused"
        yield Finding("warning", "configuration", name, "", message)


_ONLY_LOCAL = (
    "tokens are off, so only clients on this machine may change models over {}. Switch tokens on, name "
    "client_ca_file, or open it to every client with insecure_management=true"
)


def _plain_grpc(settings: ServerSettings) -> Iterator[Finding]:
    """Yield a warning if REST has TLS and gRPC does not, because each has its own setting."""
    rest = (settings.inference_address, settings.management_address)
    grpc = (settings.grpc_inference_address, settings.grpc_management_address)
    plain = [address.authority for address in grpc if address is not None]
    if plain and not settings.grpc_tls_enabled and any(address.tls for address in rest):
        message = f"REST has TLS, and gRPC on {' and '.join(plain)} is plain text; set enable_grpc_ssl=true"
        yield Finding("warning", "configuration", "enable_grpc_ssl", "false", message)


def _unused_certificate(settings: ServerSettings) -> Iterator[Finding]:
    """Yield a warning if certificate and key are set, but every listener is plain text."""
    rest = (settings.inference_address, settings.management_address, settings.metrics_address)
    is_used = settings.grpc_tls_enabled or any(address is not None and address.tls for address in rest)
    if settings.certificate_file is not None and settings.private_key_file is not None and not is_used:
        message = (
            "not used: no address begins with https://, and enable_grpc_ssl is false; write "
            "inference_address=https://HOST:PORT"
        )
        shown = _shown_value(settings.certificate_file)
        yield Finding("warning", "configuration", "certificate_file", shown, message)


def _equal_addresses(settings: ServerSettings) -> Iterator[Finding]:
    """Yield errors for two listeners at one place; only equal REST addresses share a listener."""
    addresses = {
        "inference_address": settings.inference_address,
        "management_address": settings.management_address,
        "metrics_address": settings.metrics_address,
        "grpc_inference_port": settings.grpc_inference_address,
        "grpc_management_port": settings.grpc_management_address,
    }
    for (first, one), (name, other) in combinations(addresses.items(), 2):
        if one is None or other is None or (one == other and not name.startswith("grpc_")):
            continue
        if _overlap(one, other):
            place = one.authority if one.unix_path is None else str(one)
            message = f"{first} listens on {place} already; set another address or port"
            yield Finding("error", "configuration", name, other.authority, message)


def _overlap(one: Address, other: Address) -> bool:
    """Return whether two listeners can't have these addresses at once; host names are not looked up."""
    if one.unix_path is not None or other.unix_path is not None:
        return one.unix_path == other.unix_path
    hosts = {"127.0.0.1" if each.host.lower() == "localhost" else each.host.lower() for each in (one, other)}
    is_wild = "::" in hosts or ("0.0.0.0" in hosts and not any(":" in host for host in hosts))
    return one.port == other.port != 0 and (len(hosts) == 1 or is_wild)


def _open_management(settings: ServerSettings) -> Iterator[Finding]:
    """Yield findings on management addresses that any client in the network could call."""
    addresses = {
        "management_address": settings.management_address,
        "grpc_management_address": settings.grpc_management_address,
    }
    for name, address in addresses.items():
        if address is None or settings.authorizes_clients or address.is_local:
            continue
        risk = f"every client that reaches {address.authority} may change models, and so run code"
        if settings.insecure_management:
            is_local = settings.insecure_management == "local"
            remark = _ONLY_LOCAL.format(address.authority) if is_local else f"insecure_management: {risk}"
            yield Finding("warning", "configuration", name, address.authority, remark)
            continue
        message = (
            f"tokens are off, so {risk}. Switch them on (remove disable_token_authorization and "
            "--disable-token-auth), name client_ca_file, use 127.0.0.1, or set insecure_management=true"
        )
        yield Finding("error", "configuration", name, address.authority, message)


_REST_ADDRESSES = ("inference_address", "management_address", "metrics_address")


def _build(values: Mapping[str, Any], beside: bool) -> ServerSettings:
    """Return the default settings with these values; a name with a dot is a nested field.

    `beside`: the command line names models, which are loaded in addition to those of a snapshot. Models of
    the snapshot whose archives were never found are then left out, so that a mistyped name does not stay.
    """
    settings = ServerSettings()
    fields = dict(values)
    if fields.pop(METRICS_API, True) is False:
        fields["metrics_address"] = None
    if "snapshot_models" in fields:
        fields["load_models"] = fields.get("load_models", ()) if beside else ()
        fields["load_workflows"] = ()
        entries = fields["snapshot_models"]
        models = (each for each in entries if isinstance(each, SnapshotModel))
        fields["snapshot_models"] = tuple(each for each in models if each.version or not beside)
        fields["snapshot_workflows"] = tuple(each for each in entries if isinstance(each, SnapshotWorkflow))
    for name in [name for name in fields if "." in name]:
        outer, inner = name.split(".")
        record = fields.get(outer, getattr(settings, outer))
        fields[outer] = replace(record, **{inner: fields.pop(name)})
    return replace(settings, **fields)


def _shown(text: str) -> str:
    """Return the text, escaped and shortened to `_SHOWN_CHARACTERS`."""
    return one_line(text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}...")


def _shown_value(value: object, shown: Callable[[str], str] = str) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = ", ".join(str(getattr(item, "name", item)) for item in value)
    return _shown(shown(str(value)))


def report(path: Path, configuration: Configuration) -> str:
    """Return the findings as text, in the order of the file, and the counts of errors and warnings."""
    lines = [str(path)]
    lines += [_line(finding) for finding in configuration.findings]
    errors, warnings = (len(configuration.of_level(level)) for level in ("error", "warning"))
    return "\n".join([*lines, f"{_counted(errors, 'error')}, {_counted(warnings, 'warning')}"])


def _line(finding: Finding) -> str:
    given = f"{finding.key}={finding.value}" if finding.value else finding.key
    prefix = "" if finding.level == "effect" else f"{finding.level}: "
    return f"  {finding.source}: {given}\n      {prefix}{finding.message}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
