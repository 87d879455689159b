"""Hugging Face Accelerate trains in FP8 through TransformerEngine as it does on a GPU: its own conversion, recipes and
autocast."""

import os
import subprocess
import sys

import accelerate
import pytest
import torch
import transformer_engine.pytorch as te
from support.te_cases import ARCH

# Accelerate's arguments -> how the operands of te.Linear's products are stored.
HANDLERS = {
    "delayed": ({"fp8_format": "HYBRID", "amax_history_len": 4, "amax_compute_algo": "max"}, "Float8TensorStorage"),
    "no handler": (None, "Float8TensorStorage"),
    "mxfp8": ({"fp8_format": "E4M3", "use_mxfp8_block_scaling": True}, "MXFP8TensorStorage"),
}


@pytest.fixture(autouse=True)
def alone():
    """Accelerate keeps its state for the process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("cpu", [False, True], ids=["cuda", "cpu"])
@pytest.mark.parametrize("name", HANDLERS)
def test_a_model_learns_in_fp8(name, cpu, products):
    arguments, stored = HANDLERS[name]
    if ARCH < 100 and name == "mxfp8":
        pytest.skip("MXFP8 begins with Blackwell")
    torch.manual_seed(0)
    handlers = [] if arguments is None else [accelerate.utils.TERecipeKwargs(**arguments)]
    accelerator = accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=handlers, cpu=cpu)
    assert accelerator.fp8_backend == "TE"
    assert accelerator.device.type == ("cpu" if cpu else "cuda")
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64), torch.nn.Linear(64, 10)
    )
    data = torch.utils.data.TensorDataset(torch.randn(96, 64), torch.randn(96, 10))
    loader = torch.utils.data.DataLoader(data, batch_size=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    kinds = [type(module) for module in model]
    assert kinds == [te.Linear, torch.nn.GELU, te.Linear, torch.nn.Linear]  # 10 is no multiple of 16
    losses = []
    for _ in range(5):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    # Forward, and backward for weights and, but for the first, inputs: two operands each.
    assert products.count((stored, stored)) == len(products) == len(losses) * 5


def test_evaluation_is_in_bf16(products):
    """Accelerate turns FP8 off in eval mode, unless it is told not to; the count above would see it."""
    accelerator = accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=[accelerate.utils.TERecipeKwargs()])
    model = torch.nn.Sequential(torch.nn.Linear(64, 128))
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    model.eval()
    assert model(torch.randn(32, 64)).dtype == torch.float32  # Accelerate's own: outputs come back in FP32
    assert products == [("Tensor", "Tensor")]


RANK = """
import sys
import transformer_engine.pytorch as te, torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp8", cpu=True)
torch.manual_seed(accelerator.process_index)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
for _ in range(3):
    accelerator.backward(model(torch.randn(32, 64)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
linear = accelerator.unwrap_model(model)[0]
mine = [linear.weight.detach().flatten(), linear.fp8_meta["scaling_fwd"].scale]
theirs = [accelerator.gather(part).view(2, -1) for part in mine]
assert all(torch.equal(*pair) for pair in theirs) and theirs[1][0, 0].item() != 1
sys.stdout.write(f"rank {accelerator.process_index} of {accelerator.num_processes}\\n")
"""


@pytest.mark.long
def test_two_ranks_share_weights_and_scales(tmp_path):
    (tmp_path / "train.py").write_text(RANK)
    command = [
        sys.executable,
        "-m",
        "nemo_fp8.cli",
        "run",
        "--",
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
    ]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", tmp_path / "train.py"], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
