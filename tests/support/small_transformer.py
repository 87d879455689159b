"""A small Transformer under autocast: the contracts, three layers and a head, some steps of training, the state of
delayed scaling."""

import torch
from torch.utils.checkpoint import checkpoint

from nemo_fp8.contract import Precision

TENSORWISE = Precision(format="hybrid", scaling="tensorwise")
BLOCKWISE = Precision(format="hybrid", scaling="blockwise")
MXFP8 = Precision(format="e4m3", scaling="mxfp8")
DELAYED = Precision(format="hybrid", scaling="delayed", amax_history_len=4, amax_compute_algo="max")
ALL = {"tensorwise": TENSORWISE, "blockwise": BLOCKWISE, "mxfp8": MXFP8, "delayed": DELAYED}


class Model(torch.nn.Module):
    """Three Transformer layers and a head, with or without activation recompute."""

    def __init__(self, recompute=None):
        super().__init__()
        make = lambda: torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0, batch_first=True)  # noqa: E731
        self.layers = torch.nn.ModuleList([make() for _ in range(3)])
        self.head = torch.nn.Linear(64, 32)
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = (
                layer(x)
                if self.recompute is None
                else checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
            )
        return self.head(x)


def train(model, fp8, x, steps=3, microbatches=1, inside=False):
    """Outputs and all gradients of some steps."""
    found = []
    for step in range(steps):
        model.zero_grad()
        leaves = [(x * (1 + step + i)).requires_grad_() for i in range(microbatches)]
        with fp8:
            losses = [model(leaf).float().square().mean() for leaf in leaves]
            if inside:
                sum(losses).backward()
        if not inside:
            sum(losses).backward()
        found += (
            [loss.detach() for loss in losses]
            + [leaf.grad for leaf in leaves]
            + [p.grad.clone() for p in model.parameters()]
        )
    return found


def same(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def fp8_state(model):
    return {name: t for name, t in model.state_dict().items() if ".fp8." in name}
