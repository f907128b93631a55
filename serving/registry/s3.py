"""Archives in S3: an `s3://bucket/key` becomes the signed HTTPS request that fetches it.

Who may read what is the account's business: credentials, region and endpoint come from where AWS's own tools
take them (environment, shared files, web identity of a Kubernetes service account, role of the machine).
Needs `botocore`, which the extra `s3` brings; it signs, and the download stays ours, with its bounds.
"""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from torchere.serving.errors import DownloadFailed
from torchere.serving.registry.allowed_urls import Source

SIGNATURE_LIFETIME_S = 900  # until the request must have begun


def signed(source: Source) -> Source:
    """What to ask for instead of an `s3` source. Blocks: finding credentials may ask the network.

    `url` stays the one that was asked for, so that no message or log holds a signature. The endpoint may be a
    private host, because the operator set it and no client can.

    Raises:
        DownloadFailed: botocore is not installed, or finds no credentials or region.
    """
    try:
        import botocore.exceptions  # noqa: PLC0415 - an extra, and slow to import
        import botocore.session  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415
    except ImportError as err:
        raise _failed(source, "it needs botocore: pip install 'torchere[s3]'") from err
    parameters = {"Bucket": source.host, "Key": source.target}
    try:
        client = botocore.session.get_session().create_client("s3", config=Config(signature_version="s3v4"))
        url = client.generate_presigned_url("get_object", parameters, ExpiresIn=SIGNATURE_LIFETIME_S)
    except (botocore.exceptions.BotoCoreError, ValueError) as err:
        raise _failed(source, f"{err}; set AWS_REGION and credentials as for the aws command") from err
    parts = urlsplit(url)
    return replace(
        source,
        scheme=parts.scheme,
        host=parts.hostname or "",
        port=parts.port or (443 if parts.scheme == "https" else 80),
        target=f"{parts.path}?{parts.query}",
        may_be_private=True,
    )


def _failed(source: Source, reason: str) -> DownloadFailed:
    return DownloadFailed(f"Failed to download archive from: {source.url}", reason)
