"""Archives from S3: allowed by the bucket's name, signed with the server's keys, fetched as any other."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from buckets import KEY_ID, Buckets, serve_buckets

from torchere.serving.config.model_settings import parse_model_config
from torchere.serving.config.server_settings import Limits
from torchere.serving.errors import DownloadFailed, InvalidArchive, ModelNotFound
from torchere.serving.store.fetch import Downloader, signed
from torchere.serving.store.package import Store
from torchere.serving.store.url_rules import allow

BODY = b"archive" * 1000
ALLOWED = ("s3://models/.*",)


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Buckets]:
    with serve_buckets(monkeypatch, tmp_path) as buckets:
        buckets.objects |= dict.fromkeys(("models/net.mar", "models/team a/net.mar"), BODY)
        yield buckets


@pytest.fixture
def downloader() -> Downloader:
    return Downloader(ALLOWED, max_bytes=1_000_000, timeout_s=20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def test_an_archive_is_fetched_by_a_signed_request(
    buckets: Buckets, downloader: Downloader, folder: Path
) -> None:
    download = downloader.download("s3://models/team%20a/net.mar", folder)
    assert download.path == folder / "net.mar"
    assert download.path.read_bytes() == BODY
    (asked,) = buckets.asked
    assert urlsplit(asked.target).path == "/models/team%20a/net.mar"
    signed = parse_qs(urlsplit(asked.target).query)
    assert signed["X-Amz-Credential"][0].startswith(f"{KEY_ID}/")
    assert "eu-central-1/s3/aws4_request" in signed["X-Amz-Credential"][0]


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("variable", ["AWS_REGION", "AWS_DEFAULT_REGION"])
@pytest.mark.parametrize(
    ("bucket", "host"), [("models", "models.s3.eu-south-1"), ("my.models", "s3.eu-south-1")]
)
def test_the_request_goes_to_the_host_of_the_region(
    monkeypatch: pytest.MonkeyPatch, variable: str, bucket: str, host: str
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, "eu-south-1")
    source = signed(allow(f"s3://{bucket}/net.mar", (f"s3://{bucket}/.*",)))
    assert source.host == f"{host}.amazonaws.com"
    assert "eu-south-1/s3/aws4_request" in parse_qs(source.target)["X-Amz-Credential"][0]


@pytest.mark.usefixtures("buckets")
def test_the_bounds_of_downloads_hold_and_no_message_has_a_signature(folder: Path) -> None:
    with pytest.raises(DownloadFailed) as caught:
        Downloader(ALLOWED, max_bytes=10, timeout_s=20).download("s3://models/net.mar", folder)
    assert str(caught.value) == "Failed to download archive from: s3://models/net.mar"
    assert "max_download_bytes=10" in caught.value.detail
    assert "Amz" not in caught.value.detail
    assert list(folder.iterdir()) == []


def test_without_credentials_it_says_what_is_missing(
    buckets: Buckets, downloader: Downloader, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(DownloadFailed) as caught:
        downloader.download("s3://models/net.mar", folder)
    assert "Unable to locate credentials; set AWS_REGION and credentials" in caught.value.detail
    assert buckets.asked == []


@pytest.fixture
def token_file(buckets: Buckets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a web identity, as Kubernetes gives it, to which no credentials are given."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", buckets.url)
    return tmp_path / "token"


@pytest.mark.parametrize("signs", [False, True])
@pytest.mark.parametrize(
    ("token", "reason"), [("token", "when calling the AssumeRoleWithWebIdentity"), (None, "No such file")]
)
def test_credentials_that_are_refused_fail_the_download(
    token_file: Path, folder: Path, signs: bool, token: str | None, reason: str
) -> None:
    if token:
        token_file.write_text(token)
    url = f"{os.environ['AWS_ENDPOINT_URL']}/models/net.mar" if signs else "s3://models/net.mar"
    downloader = Downloader((re.escape(url),), max_bytes=1_000_000, timeout_s=20)
    with pytest.raises(DownloadFailed) as caught:
        downloader.download(url, folder, signs=signs)
    assert reason in caught.value.detail
    assert "; set AWS_REGION and credentials" in caught.value.detail
    assert list(folder.iterdir()) == []


def test_without_botocore_it_says_what_to_install(
    downloader: Downloader, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(DownloadFailed) as caught:
        downloader.download("s3://models/net.mar", folder)
    assert caught.value.detail == "it needs botocore: pip install 'torchere[s3]'"


@pytest.mark.parametrize("pattern", [".*", "s3://.*", r"s3://mod\w+/.*"])
def test_a_pattern_has_to_spell_out_the_bucket(pattern: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        allow("s3://models/net.mar", (pattern,))
    assert caught.value.detail == "no pattern of allowed_urls spells out the bucket models"


@pytest.mark.parametrize(
    "url",
    [
        "s3://models",
        "s3://models/",
        "s3://models:80/net.mar",
        "s3://models/net.mar?versionId=1",
        "s3:///x.mar",
    ],
)
def test_what_is_no_bucket_and_key_is_refused(url: str) -> None:
    with pytest.raises(ModelNotFound, match="does not match any allowed URL"):
        allow(url, ("s3://models.*", "s3://.*"))


def test_a_url_of_s3_is_signed_where_the_client_asks_for_it(buckets: Buckets, folder: Path) -> None:
    url = f"{os.environ['AWS_ENDPOINT_URL']}/models/team%20a/net.mar"
    downloader = Downloader((re.escape(url),), max_bytes=1_000_000, timeout_s=20)
    with pytest.raises(DownloadFailed):
        downloader.download(url, folder)
    assert downloader.download(url, folder, signs=True).path.read_bytes() == BODY
    path, query = buckets.asked[-1].target.split("?")
    assert path == "/models/team%20a/net.mar"
    assert parse_qs(query)["X-Amz-Credential"][0].split("/")[2:4] == ["eu-central-1", "s3"]


def test_credentials_open_a_host_that_is_spelt_out_only(buckets: Buckets, folder: Path) -> None:
    url = f"{os.environ['AWS_ENDPOINT_URL']}/models/net.mar"
    downloader = Downloader((".*",), max_bytes=1_000_000, timeout_s=20)
    with pytest.raises(DownloadFailed) as caught:
        downloader.download(url, folder, signs=True)
    assert caught.value.detail == "s3_sse_kms: no pattern of allowed_urls spells out the host 127.0.0.1"
    assert not buckets.asked


def test_a_signed_download_without_credentials_says_what_is_missing(
    buckets: Buckets, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{os.environ['AWS_ENDPOINT_URL']}/models/net.mar"
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.delenv("AWS_REGION", raising=False)
    with pytest.raises(DownloadFailed) as caught:
        Downloader((re.escape(url),), max_bytes=9, timeout_s=20).download(url, folder, signs=True)
    assert caught.value.detail.startswith("s3_sse_kms: no region; set AWS_DEFAULT_REGION")


@pytest.mark.parametrize(
    ("allowed", "reason"),
    [
        ((), "allowed_urls is empty"),
        ((".*",), "no pattern of allowed_urls spells out the bucket weights"),
        (("s3://models/.*",), "no pattern of allowed_urls matches it"),
        (("s3://weights/llama/.*",), "no pattern of allowed_urls matches it"),
    ],
)
def test_a_clients_archive_names_no_weights_that_the_operator_does_not_allow(
    tmp_path: Path, allowed: tuple[str, ...], reason: str
) -> None:
    store = Store(tmp_path, Limits(), tmp_path, allowed_urls=allowed)
    with (
        closing(store),
        pytest.raises(InvalidArchive, match="no client may name them: s3://weights/net/step-1/") as caught,
    ):
        store.check_weights(parse_model_config("parallel: {tensor: 2, weights: s3://weights/net/step-1/}"))
    assert reason in caught.value.detail


@pytest.mark.parametrize("section", ["{tensor: 2, weights: s3://weights/net/step-1/}", "{tensor: 2}", "3"])
def test_weights_that_the_operator_allows_may_be_named(tmp_path: Path, section: str) -> None:
    with closing(Store(tmp_path, Limits(), tmp_path, allowed_urls=("s3://weights/net/.*",))) as store:
        store.check_weights(parse_model_config(f"parallel: {section}"))
