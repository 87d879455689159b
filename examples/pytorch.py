"""FP8 in plain PyTorch: one context manager, any model, a CPU or a GPU.

    .venv/bin/python examples/pytorch.py

You see the loss of a small network, trained from the same weights on the same data in BF16 and under three FP8 recipes,
a few percent apart.
"""

import torch

import nemo_fp8


def train(name: str, steps: int = 60) -> float:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    teacher = torch.nn.Linear(128, 128).bfloat16().requires_grad_(False)
    for _ in range(steps):
        x = torch.randn(256, 128, dtype=torch.bfloat16)
        with nemo_fp8.autocast(nemo_fp8.preset(name), model):
            y = model(x)
        loss = (y - teacher(x)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


for name in ("bf16_mixed", "bf16_with_fp8_mixed", "bf16_with_fp8_blockwise_mixed", "bf16_with_mxfp8_mixed"):
    print(f"{name:<30} loss {train(name):.4f}")
