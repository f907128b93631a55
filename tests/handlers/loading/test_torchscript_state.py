import io
from collections.abc import Callable

import pytest
import torch

from torchere.handlers.loading.torchscript import changes_itself

Saved = Callable[[torch.nn.Module], torch.jit.ScriptModule]
IMAGES = torch.ones(2, 3, 8, 8)


class Network(torch.nn.Module):
    """What networks of convolutions are made of: nothing of it is written to in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(3, 1, 1))
        self.convolution = torch.nn.Conv2d(3, 3, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(3)
        self.relu = torch.nn.ReLU(inplace=True)
        self.dropout = torch.nn.Dropout(0.5, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - self.mean
        y = self.relu(self.norm(self.convolution(x)))
        y += x
        return self.dropout(y)


class Nothing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x[:, 0])[0]


class Scratch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scratch: torch.Tensor
        self.register_buffer("scratch", torch.zeros(4, 3, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scratch[: x.shape[0]] = x
        return self.scratch[: x.shape[0]] * 2


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count


class Cache(torch.nn.Module):
    kept: dict[str, torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"last": torch.zeros(1)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept["last"] = x
        return x


class Within(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


def scripted(module: torch.nn.Module) -> torch.jit.ScriptModule:
    return torch.jit.script(module.eval())


def traced(module: torch.nn.Module) -> torch.jit.ScriptModule:
    return torch.jit.trace(module.eval(), IMAGES, check_trace=False)


def frozen(module: torch.nn.Module) -> torch.jit.ScriptModule:
    return torch.jit.freeze(torch.jit.script(module.eval()))


def loaded(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", [Network, Recurrent, Nothing])
@pytest.mark.parametrize("saved", [scripted, traced, frozen])
def test_what_writes_to_what_it_made_itself_changes_nothing(
    kind: type[torch.nn.Module], saved: Saved
) -> None:
    module = loaded(saved(kind()))
    before = str(module.graph)
    assert not changes_itself(module)
    assert str(module.graph) == before


@pytest.mark.parametrize("kind", [Scratch, Counter, Cache, Within])
@pytest.mark.parametrize("saved", [scripted, frozen])
def test_a_write_to_a_tensor_a_list_or_a_number_of_its_own_is_found(
    kind: type[torch.nn.Module], saved: Saved
) -> None:
    assert changes_itself(loaded(saved(kind())))


KEPT_BY_THE_TRACE = torch.zeros(2, 3, 8, 8)


class TracedConstant(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return KEPT_BY_THE_TRACE.copy_(x) * 2


@pytest.mark.parametrize("kind", [Scratch, TracedConstant])
def test_a_traced_write_is_found(kind: type[torch.nn.Module]) -> None:
    assert changes_itself(loaded(traced(kind())))


def test_an_optimised_module_is_looked_into_as_well() -> None:
    assert not changes_itself(torch.jit.optimize_for_inference(scripted(Network())))
    assert changes_itself(torch.jit.optimize_for_inference(scripted(Scratch())))
