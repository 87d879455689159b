"""What a rank of a test does: a spawned process imports this file, and nothing of TE before the CPU stands in for its
GPU."""

import torch


def cross_entropy(rank, world, path, arch, results):
    """One half of the vocabulary."""
    from nemo_fp8 import te_cpu

    te_cpu.install(arch)
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    torch.manual_seed(0)
    whole, y = torch.randn(3, 4, 50), torch.randint(0, 50, (3, 4))
    x = whole[..., rank * 25 : (rank + 1) * 25].clone().requires_grad_()
    loss = parallel_cross_entropy(x, y, 0.1, False, torch.distributed.group.WORLD)
    loss.sum().backward()
    results.put((rank, loss.detach().tolist(), x.grad.tolist()))
