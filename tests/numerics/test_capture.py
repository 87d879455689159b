"""Captured activations: what each linear saw, and its gradient, in a file."""

import pytest
import torch
from safetensors import safe_open

import nemo_fp8
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.capture import capture


class Pair(torch.nn.Linear):
    """Megatron's linears return (output, bias)."""

    def forward(self, x):
        return super().forward(x), None


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)).bfloat16()


def test_inputs_and_gradients_in_a_file(model, tmp_path):
    x = torch.randn(3, 5, 16).bfloat16()
    with nemo_fp8.capture(model, tmp_path / "a.safetensors") as captured:
        y = model(x)
        y.float().square().sum().backward()
    hidden = model[1](model[0](x))
    assert torch.equal(captured["0.input"], x.view(15, 16))
    assert torch.equal(captured["2.input"], hidden.view(15, 32))
    assert torch.equal(captured["2.grad"], (2 * y.float()).bfloat16().view(15, 8))
    assert set(captured) == {"0.input", "2.input", "0.grad", "2.grad"}
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert set(file.keys()) == set(captured)
        assert all(torch.equal(file.get_tensor(name), t) for name, t in captured.items())


def test_a_sample_of_rows_over_many_calls(model):
    with capture(model, rows=20, only="2") as captured, torch.no_grad():
        inputs = [torch.randn(8, 16).bfloat16() for _ in range(5)]
        for x in inputs:
            model(x)
    assert set(captured) == {"2.input"}
    assert torch.equal(captured["2.input"], model[1](model[0](torch.cat(inputs)))[:20])


def test_outputs_that_are_tuples():
    model = Pair(16, 16)
    with capture(model) as captured:
        model(torch.randn(4, 16))[0].sum().backward()
    assert torch.equal(captured["grad"], torch.ones(4, 16))


def test_the_model_is_as_before(model):
    with capture(model):
        model(torch.randn(2, 16).bfloat16())
    assert all(not m._forward_hooks for m in model.modules())
    with pytest.raises(ZeroDivisionError), capture(model):
        raise ZeroDivisionError
    assert all(not m._forward_hooks for m in model.modules())


def test_nothing_to_capture_is_an_error(model, tmp_path):
    with pytest.raises(PrecisionError, match="no linear is called"), capture(model, only="nothing*"):
        pass
    with pytest.raises(PrecisionError, match="Nothing was captured"), capture(model, tmp_path / "a.safetensors"):
        pass
    assert not (tmp_path / "a.safetensors").exists()


@pytest.mark.parametrize(
    ("model_", "path", "words"),
    [
        (None, "a.safetensors", "a model that is a NoneType"),
        ("model", "a.safetensors", "a model that is a str"),
        (torch.nn.Linear(4, 4), "", "saved at"),
        (torch.nn.Linear(4, 4), "missing/a.safetensors", "saved at"),
        (torch.nn.Linear(4, 4), 3, "saved at 3"),
    ],
)
def test_what_could_not_be_saved_is_refused_before_the_run(tmp_path, monkeypatch, model_, path, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PrecisionError, match=f"(?i){words}"), nemo_fp8.capture(model_, path):
        raise AssertionError("the block ran")
