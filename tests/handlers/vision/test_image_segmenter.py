from __future__ import annotations

import torch

from torchere.handlers.vision.tasks import ImageSegmenter


def test_each_pixel_gets_its_class_and_probability() -> None:
    scores = torch.zeros(1, 3, 2, 2)
    scores[0, 2, 0, 1] = 100.0
    (picture,) = ImageSegmenter().postprocess({"out": scores})
    assert picture[0][1] == [2.0, 1.0]
    assert picture[1][0][0] == 0.0
    assert abs(picture[1][0][1] - 1 / 3) < 1e-6
