"""What a rank of a test does: a spawned process imports this file, and nothing of TE before the CPU stands in for its
GPU."""

from contextlib import ExitStack

import torch

SHAPE = (480, 480)
"""No multiple of a block of 128, and four of them each way: TE's layouts of scales pad to as many."""
CUTS = ([0, 81001, 81001, 480 * 480], [0, 1, 185002, 480 * 480])
"""Where ranks' shares of a weight begin and end: in the middle of rows; one rank has none, one has one element."""
SOURCES = {
    "normal": lambda: torch.randn(SHAPE),
    "zeros": lambda: torch.zeros(SHAPE),
    "outliers": lambda: torch.randn(SHAPE) * torch.logspace(-15, 15, SHAPE[1]),
}


def master(source):
    """The master weight of a whole matrix, the same in every process."""
    torch.manual_seed(3)
    return SOURCES[source]()


def weight_quantizers():
    """TE's quantizer of a weight under each recipe, as its modules make them."""
    from transformer_engine.pytorch import (
        DType,
        Float8BlockQuantizer,
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
        MXFP8Quantizer,
        NVFP4Quantizer,
    )

    e4m3 = DType.kFloat8E4M3
    blocks = {"fp8_dtype": e4m3, "rowwise": True, "columnwise": True, "block_scaling_dim": 2}
    return {
        "delayed": lambda: Float8Quantizer(torch.full([1], 8.0), torch.zeros(1), e4m3),
        "tensorwise": lambda: Float8CurrentScalingQuantizer(e4m3, device=torch.device("cpu")),
        "tensorwise.pow2": lambda: Float8CurrentScalingQuantizer(
            e4m3, device=torch.device("cpu"), force_pow_2_scales=True, amax_epsilon=2**-6
        ),
        "blockwise": lambda: Float8BlockQuantizer(**blocks, force_pow_2_scales=True),
        "blockwise.fp32": lambda: Float8BlockQuantizer(**blocks, force_pow_2_scales=False),
        "mxfp8": lambda: MXFP8Quantizer(e4m3),
        "nvfp4": lambda: NVFP4Quantizer(with_2d_quantization=True),
    }


def shards(rank, world, path, arch, cases, folder, mended=None):
    """Weights of which each rank casts its share of the master; the last rank writes down what all of them hold then.

    Shares are gathered by adding bytes, so a rank that wrote beyond its own would be seen. ``mended`` is a contract
    whose casts the plugin mends.
    """
    from nemo_fp8 import te_cpu

    te_cpu.install(arch)
    with ExitStack() as held:
        if mended is not None:
            from nemo_fp8.train.row_casts import hold_row_casts

            hold_row_casts(held, mended)
        _shards(rank, world, path, cases, folder)


def _shards(rank, world, path, cases, folder):
    from transformer_engine.pytorch.tensor.utils import post_all_gather_processing, quantize_master_weights

    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    quantizers = weight_quantizers()
    for recipe, source, cut in cases:
        quantizer = quantizers[recipe]()
        weight = quantizer(torch.randn(SHAPE).bfloat16())  # another one: nothing of it may stay
        if hasattr(quantizer, "amax"):
            quantizer.amax.zero_()
        raw = [getattr(weight, name, None) for name in ("_data", "_rowwise_data", "_columnwise_data")]
        for codes in (codes for codes in raw if codes is not None):
            codes.zero_()
        start, end = CUTS[cut][rank : rank + 2]
        share = master(source).view(-1)[start:end] if end > start else None
        quantize_master_weights([weight], [share], [start if end > start else None], torch.distributed.group.WORLD)
        for codes in (codes for codes in raw if codes is not None):
            torch.distributed.all_reduce(codes)
        post_all_gather_processing([weight])
        if rank == world - 1:
            torch.save(buffers(weight), f"{folder}/{recipe}-{source}-{cut}")


def buffers(weight):
    """Codes, scales and amaxes of every copy that a quantized tensor keeps, and the amax of its quantizer."""
    kept = {name: value for name, value in weight.get_metadata().items() if isinstance(value, torch.Tensor)}
    amax = getattr(weight._get_quantizer(), "amax", None)
    return kept | ({} if amax is None else {"quantizer": amax})


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
