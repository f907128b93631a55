"""What models may be called."""

import pytest

from torchere.serving.errors import InvalidRequest
from torchere.serving.registry.names import check_model_name, default_model_name


@pytest.mark.parametrize(
    ("url", "name"),
    [("a.mar", "a"), ("x/my model.mar", "my_model"), ("r.1.mar", "r_1"), ("d.tar.gz", "d_tar_gz")],
)
def test_a_model_nobody_named_is_named_after_its_file(url: str, name: str) -> None:
    assert default_model_name(url) == name


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "a\0", "-a", "é", "a" * 256, "a\n"])
def test_a_name_that_could_be_a_path_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="Model name"):
        check_model_name(name)
