"""TransformerEngine on a machine without a GPU: TE's own Python over a CPU implementation of its compiled extension.

    from nemo_fp8 import te_cpu

    te_cpu.install(arch=100)                       # before anything imports transformer_engine
    import transformer_engine.pytorch as te        # the real package, its sources untouched

TE is Python above one extension module, ``transformer_engine_torch``, and everything that makes a recipe what it is
lies above that line: when a weight is quantized, which copies of a tensor are kept, which one backward reads, what is
gathered in FP8, how amaxes are reduced, what a checkpoint holds. All of that runs here as it runs on a GPU, since it is
the same code. Below the line stand three things:

- ``extension``: the module's functions on :mod:`nemo_fp8.numerics`, so that codes and scales are those of the GPU, to
the bit;
- ``device``: the CPU as CUDA device 0, since TE allocates on ``cuda`` and asks ``torch.cuda`` what it can do;
- ``switch``: both put in place, in a process that has no GPU, before TE is imported.

    bit for bit          codes, scales and amaxes of every cast
    to rounding          sums of a GEMM and of a norm, exponentials: their order and their last bit are the hardware's
                         own
    by distribution      stochastic rounding and dropout, whose generator is not the GPU's
    not at all           CUDA graphs, userbuffers, cuDNN's fused attention and the rings built on it: each raises under
                         its own name

The trade-off: TE asks for CUDA in too many ways for a context that opens and closes, so the CPU stands in for the GPU
until the process ends. Nothing of it happens on ``import nemo_fp8``, nor where a GPU is there.
"""

from nemo_fp8.te_cpu.switch import has_gpu, install, is_installed

__all__ = ["has_gpu", "install", "is_installed"]
