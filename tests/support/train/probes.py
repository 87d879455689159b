"""What tests look at inside a run, in the ranks: ``before`` functions watch, ``probe`` functions report."""

import hashlib
from collections import Counter
from contextlib import ExitStack

import ml_dtypes
import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from nemo_fp8.train.linears import is_linear, weights_of
from nemo_fp8.train.measure import _is_primary, _quantizers

SEEN = Counter()
CASTS = Counter()
OPEN = ExitStack()
NAMES = {}
FP8 = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}
# Whether weight or input, and input or gradient, are read by rows.
GEMMS = {(True, True): "fprop", (False, True): "dgrad", (False, False): "wgrad"}


# ---------------------------------------------------------------------- which GEMMs ran, and on what


class Multiplied(TorchFunctionMode):
    """The matrices that are really multiplied."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.mm, torch.addmm):
            self.operands = args[-2:]
        return func(*args, **kwargs or {})


def watch_gemms(trainer, tiny):
    """Count GEMMs by kind, hold what they multiply against the FP8 grid, and note every cast by its quantizer."""
    from nemo_fp8.te_cpu import gemm as gemms
    from nemo_fp8.te_cpu.quantized import watching_casts

    gemm, operand, by_rows = gemms.gemm, gemms._operand, []

    def asked(tensor, rows):
        by_rows.append(rows)
        return operand(tensor, rows)

    def watched(a, b, **kwargs):
        with Multiplied() as multiplied:
            out = gemm(a, b, **kwargs)
        kind = GEMMS[tuple(by_rows[-2:])]
        SEEN[kind] += 1
        left, right = multiplied.operands
        for q, matrix, contracts_rows in ((a, left, a.usage == "col"), (b, right, b.usage == "row")):
            SEEN[
                f"{kind} {'on' if on_grid(q, matrix.t() if contracts_rows else matrix) else 'OFF'} grid {q.data.dtype}"
            ] += 1
        return out

    gemms.gemm, gemms._operand = watched, asked
    OPEN.enter_context(watching_casts(lambda quantizer, x, out: CASTS.update([id(quantizer)])))


def on_grid(q, matrix):
    """Whether a matrix holds exactly the FP8 values of ``q``, by themselves or times their scales."""
    codes = q.data.view(torch.uint8).numpy().view(FP8[q.data.dtype]).astype(np.float64).reshape(matrix.shape)
    scale = q.scale_inv_fp32.double().numpy()
    if q.block is not None:
        rows, columns = q.block
        scale = scale.repeat(rows, 0)[: matrix.shape[0]].repeat(columns, 1)[:, : matrix.shape[1]]
    values = matrix.double().numpy()
    return np.array_equal(values, codes) or np.array_equal(values, codes * scale)


def seen(trainer, extra):
    weights = {id(q) for module in linears(trainer).values() for role, q in _quantizers(module) if role == "weight"}
    extra["seen"] = dict(SEEN) | {"weights quantized": sum(CASTS[q] for q in weights)}


# ---------------------------------------------------------------------- who multiplies in BF16


class Products(TorchDispatchMode):
    """Counts the operators that multiply BF16 matrices, and of the plain ones those whose result is the FP32 product
    rounded once.

    Which operators are products is said by torch's own table of operators that have a count of multiplications.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        matrices = [a for a in args if isinstance(a, torch.Tensor) and a.dtype is torch.bfloat16]
        if func.overloadpacket in flop_registry and matrices:
            SEEN[func.overloadpacket.__name__] += 1
            if func.overloadpacket is torch.ops.aten.mm:
                SEEN[
                    "in FP32" if torch.equal(out, (args[0].float() @ args[1].float()).bfloat16()) else "otherwise"
                ] += 1
        return out


def watch_products(trainer, tiny):
    Products().__enter__()


# ---------------------------------------------------------------------- what travels between ranks


def watch_gather(trainer, tiny):
    """Count the bytes of the all-gather of parameters, by type."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    gather = buffers.dist_all_gather_func

    def counted(output, input, **kwargs):
        SEEN[str(output.dtype)] += output.numel() * output.element_size()
        return gather(output, input, **kwargs)

    buffers.dist_all_gather_func = counted


# ---------------------------------------------------------------------- what the modules hold


def linears(trainer):
    return {
        name.replace("module.", ""): module
        for name, module in trainer.strategy.model.named_modules()
        if is_linear(module)
    }


def delayed(module):
    """Scales and amax histories of a linear under delayed scaling: forward's input and weight, the gradient of its
    output."""
    states = module.fp8_meta.get("scaling_fwd"), module.fp8_meta.get("scaling_bwd")
    if not all(hasattr(state, "amax_history") for state in states):
        return []
    return [
        t[..., slots]
        for state, slots in zip(states, (slice(2), slice(1)), strict=True)
        for t in (state.scale, state.amax_history)
    ]


def states(trainer, extra):
    """A digest of all delayed states, the scales of each rank, and which linears hold FP8 weights or ran in FP8."""
    found = {name: delayed(module) for name, module in linears(trainer).items()}
    extra["digest"] = hashlib.sha256(
        b"".join(t.contiguous().numpy().tobytes() for state in found.values() for t in state)
    ).hexdigest()
    mine = [float(x) for state in found.values() if state for x in state[0]]
    extra["scales"] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(extra["scales"], mine)
    extra["primary"] = [
        name for name, module in linears(trainer).items() if any(_is_primary(w) for w in weights_of(module))
    ]
    extra["ran"] = [name for name, module in linears(trainer).items() if module.fp8]
    extra["experts"] = [module.num_gemms for module in linears(trainer).values() if hasattr(module, "num_gemms")]


# ---------------------------------------------------------------------- what is tried, and what is left


def gather_mxfp8(trainer, tiny):
    from nemo_fp8.train.mxfp8_gather import Mxfp8Gather

    trainer.callbacks.append(Mxfp8Gather())


def names_as_they_are():
    """Everything that the table's owners hold, under every name."""
    from nemo_fp8.train import megatron_cpu

    return {
        (p.target, name): value
        for p in megatron_cpu.TABLE
        for name, value in vars(p.owner()).items()
        if not name.startswith("__")
    }


def remember_names(trainer, tiny):
    NAMES.update(names_as_they_are())


def names_left_behind(extra):
    after = names_as_they_are()
    extra["left"] = sorted(
        f"{target}.{name}"
        for target, name in NAMES | after
        if NAMES.get((target, name)) is not after.get((target, name))
    )


# ---------------------------------------------------------------------- recipes of modules


def recipes(trainer, extra):
    """Linear -> TE's recipe of its last step, and what its backward does otherwise; None for the compute dtype."""

    def said(module):
        recipe = module.fp8_meta["recipe"] if module.fp8 else None
        return recipe and [type(recipe).__name__, recipe.backward_override]

    extra["recipes"] = {name.removeprefix("0."): said(module) for name, module in linears(trainer).items()}
