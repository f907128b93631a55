from __future__ import annotations

import pytest
import torch

from torchere.handlers.vision import integrated_gradients


def test_a_curved_score_is_integrated_exactly() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.sum(dim=1), (x**3).sum(dim=1)], dim=1)

    inputs = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    result = integrated_gradients(model, inputs, 1)
    assert torch.allclose(result, inputs**3, atol=1e-5)


def test_each_element_of_a_batch_may_have_its_own_target() -> None:
    result = integrated_gradients(lambda x: x * torch.tensor([1.0, 10.0]), torch.ones(2, 2), [0, 1])
    assert torch.allclose(result, torch.tensor([[1.0, 0.0], [0.0, 10.0]]), atol=1e-5)


def test_shared_parameters_get_no_gradients() -> None:
    model = torch.nn.Linear(2, 2)
    result = integrated_gradients(model, torch.ones(1, 2), 0)
    assert model.weight.grad is None
    assert result.sum().item() == pytest.approx(model.weight[0].sum().item(), abs=1e-5)
