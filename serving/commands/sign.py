"""`torchere sign` signs an archive; `torchere verify` checks who signed it, as the server does."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from torchere.archiver.arguments import explained
from torchere.archiver.errors import ArchiveError
from torchere.archiver.reader import Archive, ArchiveLimits, open_archive
from torchere.serving.errors import InvalidArchive
from torchere.serving.store.signing import (
    SigningUnusable,
    SignWith,
    Trust,
    TrustedIdentity,
    TrustedKeys,
    sign,
    verified_copy,
)

_SIGN_EXAMPLES = """examples:
  openssl ecparam -name prime256v1 -genkey -noout -out signing.pem    # once
  openssl ec -in signing.pem -pubout -out signing.pub
  torchere sign store/net.mar --key signing.pem                       # writes store/net.mar.sig
  torchere sign store/net.mar --key signing.pem --certificate signing.crt --chain intermediate.crt"""
_VERIFY_EXAMPLES = """examples:
  torchere verify store/net.mar --trust signing.pub
  torchere verify store/net.mar --trust ca.crt"""


def add_sign(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere sign` to `parser`."""
    text = "Sign an archive (OpenSSF Model Signing), and print the path of the signature."
    explained(parser, text, _SIGN_EXAMPLES)
    add = parser.add_argument
    add("archive", type=Path, help="a .mar, a .tar.gz, or a folder (its signature is model.sig in it)")
    means = parser.add_mutually_exclusive_group(required=True)
    means.add_argument("--key", type=Path, metavar="FILE", help="private key: PEM, P-256, P-384 or P-521")
    means.add_argument("--sigstore", action="store_true", help="sign without a key, by an identity (network)")
    add("--password-file", type=Path, metavar="FILE", help="password of an encrypted private key")
    add("--certificate", type=Path, metavar="FILE", help="certificate of the key (PEM)")
    add(
        "--chain",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="certificate between that and the CA; may be repeated",
    )
    add("--ambient", action="store_true", help="with --sigstore: identity of the CI job or machine")
    add("--identity-token", type=Path, metavar="FILE", help="with --sigstore: file with an OpenID token")
    _add_sigstore_arguments(parser)
    parser.set_defaults(run=_sign)


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere verify` to `parser`."""
    text = (
        "Verify the signature of an archive, as a server with require_signed=true does. Status 1: not valid."
    )
    explained(parser, text, _VERIFY_EXAMPLES)
    add = parser.add_argument
    add("archive", type=Path, help="a .mar, a .tar.gz or a folder")
    trust = parser.add_mutually_exclusive_group(required=True)
    trust.add_argument(
        "--trust",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="trusted signer (PEM): a public key, or certificates of a CA; may be repeated",
    )
    trust.add_argument(
        "--identity", help="trusted Sigstore identity, for example an e-mail address (network)"
    )
    add("--issuer", metavar="URL", help="with --identity: its OpenID Connect provider")
    _add_sigstore_arguments(parser)
    parser.set_defaults(run=_verify)


def _add_sigstore_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--staging", action="store_true", help="use Sigstore's staging service, for tests")
    parser.add_argument(
        "--trust-config", type=Path, metavar="FILE", help="client trust configuration of a private Sigstore"
    )


def _sign(options: argparse.Namespace) -> int:
    """Sign the archive and print the path of the signature."""
    if options.password_file and (options.certificate or options.sigstore):
        raise SigningUnusable("--password-file is for --key without --certificate.", "decrypt the key first")
    if (options.certificate or options.chain) and not (options.key and options.certificate):
        raise SigningUnusable("--certificate needs --key, and --chain needs --certificate.")
    means = SignWith(
        key=options.key,
        password=_first_line(options.password_file),
        certificate=options.certificate,
        chain=tuple(options.chain),
        ambient=options.ambient,
        identity_token=_first_line(options.identity_token),
        staging=options.staging,
        trust_config=options.trust_config,
    )
    print(sign(_opened(options.archive), means))
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Verify the signature of the archive and print its signer."""
    trust: Trust
    if options.trust:
        trust = TrustedKeys(options.trust)
    elif options.issuer:
        trust = TrustedIdentity(options.identity, options.issuer, options.staging, options.trust_config)
    else:
        raise SigningUnusable("--identity needs --issuer.")
    archive = _opened(options.archive)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            _, signer = verified_copy(archive, ArchiveLimits(), trust, Path(folder))
        except ArchiveError as err:
            raise InvalidArchive(err.reason, str(err)) from err
    print(f"{options.archive}: signed by {signer}")
    return 0


def _opened(path: Path) -> Archive:
    try:
        return open_archive(path, as_packed=True)
    except ArchiveError as err:
        raise InvalidArchive("The archive can't be used:", str(err)) from err


def _first_line(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8").partition("\n")[0].rstrip("\r")
    except (OSError, UnicodeDecodeError) as err:
        raise SigningUnusable(f"{file} can't be read.", str(err)) from err
