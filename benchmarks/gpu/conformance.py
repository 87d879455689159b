"""TransformerEngine's bits: recorded as golden vectors, compared at full size; and our kernels against our
specification.

Golden vectors go to tests/golden, where the tests hold nemo_fp8.numerics to them on any CPU (the format is in golden.py
there). TE keeps column-wise data transposed and pads scales for its GEMMs; what is compared is as it lies on the
source.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from golden import ROLES, SHAPES, Differences, Golden, delayed_inputs, hold, inputs, precision_of
from recording import RECIPES, Pair, new, record, record_delayed, usages

from nemo_fp8.contract import Operand
from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.formats import FORMATS
from nemo_fp8.numerics.quantize import quantize, quantize_reference
from nemo_fp8.numerics.quantized import Quantized
from nemo_fp8.render.te import te_recipe

from .measuring import Run, Skipped, te_quantizer, told

LIVE = {"activation": (8192, 14336), "weight": (14336, 4096), "ragged": (4104, 4112)}
SMALL = {"activation": (256, 512), "ragged": (264, 272)}
RULES = [("te", "fp32"), ("te", "pow2"), ("deepgemm", "fp32"), ("deepgemm", "pow2"), ("te", "e8m0")]
TILES = [(128, 128), (1, 128), (128, 1), (1, 32), (32, 1), None]


def measure(run: Run, name: str) -> None:
    """Run one measure of this part."""
    if name.startswith("golden "):
        golden(run, name.removeprefix("golden "))
    else:
        {"our kernels": our_kernels, "TE beside us": beside}[name](run)


# ---------------------------------------------------------------------- golden vectors


def golden(run: Run, recipe: str) -> None:
    """Record a file, and hold our numerics to it at once, on the CPU and on this device."""
    import transformer_engine

    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    whose = "te_cpu in the place of its kernels" if run.small else f"its CUDA kernels on {torch.cuda.get_device_name()}"
    source, command = f"TransformerEngine {transformer_engine.__version__}, {whose}", "make gpu PART=conformance"
    found, left_out = new(source, versions, command), {}
    if recipe == "delayed":
        record_delayed(found, functools.partial(te_delayed, run.small), zeros=True)
    else:
        left_out = record(found, te_kernels, recipe, tuple(inputs()), "cuda")
    if not found.cases:
        raise Skipped(f"TransformerEngine refuses every case here: {next(iter(left_out.values()))}")
    found.save(run.folder / f"{recipe}.safetensors")
    found = Golden.load(run.folder / f"{recipe}.safetensors")
    compared, different = {}, {}
    for device in ("cpu",) if run.small else ("cpu", "cuda"):
        held = {case["name"]: hold(found, case, device) for case in found.cases}
        kinds = ("codes", "scales", "histories")
        compared[device] = {kind: sum(d.compared.get(kind, 0) for d in held.values()) for kind in kinds}
        compared[device]["different"] = sum(d.total for d in held.values())
        different |= {f"{case} on {device}": str(d) for case, d in held.items() if d.total}
    run.found = {"cases": len(found.cases), "compared": compared, "different": different, "left_out": left_out}


def te_kernels(x: torch.Tensor, operand: Operand, usage: str) -> Pair:
    """Return TE's own codes and scale_inv for an operand, brought into our layout."""
    row, (m, k), quantizer = usage == "row", x.shape, te_quantizer(operand, usage)
    if operand.scale == "e8m0" and (m % 32 or k % 32):
        raise ValueError("TE's MXFP8 takes multiples of 32")
    q = quantizer(x)
    if operand.block is None:
        return q._data, q._scale_inv.reshape(())
    data, scales = (q._rowwise_data, q._rowwise_scale_inv) if row else (q._columnwise_data, q._columnwise_scale_inv)
    if operand.scale == "e8m0":
        return data, scales.view(torch.uint8)[: m if row else m // 32, : k // 32 if row else k]
    data = data if row else data.t()
    if operand.block == (128, 128):
        return data, scales[: -(-m // 128), : -(-k // 128)]
    return data, scales[: -(-k // 128), :m].t() if row else scales[: -(-m // 128), :k]


def te_delayed(small: bool, rank: int, group: Any, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Run a real ``te.Linear`` through several steps, amaxes reduced over the ranks by TE: the codes it makes, the
    state it keeps."""
    if small:
        from nemo_fp8 import te_cpu

        te_cpu.install()
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    recipe = te_recipe(precision_of(case))
    rows, columns = SHAPES["weight"]
    linear = te.Linear(columns, rows, bias=False, params_dtype=torch.bfloat16, device="cuda")
    grad_type = te.DType.kFloat8E5M2 if case["format"] == "hybrid" else te.DType.kFloat8E4M3
    keys = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
    kept: dict[str, torch.Tensor] = {}
    for step, given in delayed_inputs():
        mine = {role: given[f"{rank}/{role}"].to("cuda") for role in SHAPES}
        for direction, roles in ROLES.items():
            for slot, role in enumerate(roles):
                state = linear.fp8_meta.get(keys[direction])
                scale = torch.ones(1, device="cuda") if state is None else state.scale[slot : slot + 1].clone()
                amax = torch.zeros(1, device="cuda")
                dtype = grad_type if role == "grad" else te.DType.kFloat8E4M3
                q = te.Float8Quantizer(scale, amax, dtype, rowwise=True, columnwise=False)(mine[role])
                key = f"{step}/{rank}/{role}"
                kept |= {f"{key}.codes": q._data, f"{key}.scale_inv": q._scale_inv.reshape(())}
                kept[f"{key}.amax"] = amax.reshape(())
        with torch.no_grad():
            linear.weight.copy_(mine["weight"])
        with te.autocast(enabled=True, recipe=recipe, amax_reduction_group=group):
            y = linear(mine["input"].requires_grad_())
        y.backward(mine["grad"])
        for direction, roles in ROLES.items():
            state = linear.fp8_meta[keys[direction]]
            kept[f"{step}/{direction}.scale"] = state.scale[: len(roles)].clone()
            kept[f"{step}/{direction}.history"] = state.amax_history[:, : len(roles)].clone()
    return {name: t.detach().cpu() for name, t in kept.items()}


# ---------------------------------------------------------------------- side by side


def beside(run: Run) -> None:
    """Compare TE with us on the same device, at the sizes of a model: how many codes and scales differ."""
    for (what, shape), (recipe, kinds) in itertools.product((SMALL if run.small else LIVE).items(), RECIPES.items()):
        x = torch.randn(shape, device="cuda").mul_(torch.randn(shape[0], 1, device="cuda").exp()).bfloat16()
        for (block, scale), usage in ((kind, usage) for kind in kinds for usage in usages(kind[0])):
            tile = "tensor" if block is None else "x".join(map(str, block))
            name = f"{what} {shape[0]} x {shape[1]}, {recipe} {tile} {scale} {usage}"
            operand, found = Operand("e4m3", block, scale), Differences()
            try:
                codes, scale_inv = te_kernels(x, operand, usage)
            except (Skipped, ValueError, RuntimeError) as refused:
                run.found[name] = {"left_out": told(refused)}
                continue
            ours = quantize(x, operand, usage=usage)
            found.hold("codes", name, ours.data, codes.cpu())
            found.hold("scales", name, ours.scale_inv, scale_inv.cpu())
            run.found[name] = {"compared": found.compared, "different": found.different}
            run.keep()


def our_kernels(run: Run) -> None:
    """Compare this device's kernels with the specification in torch on the CPU, to the bit: codes, scales, statistics
    and decoded values.

    Each kind of case is a program to compile, so that most of the time goes into that.
    """
    found = Differences()
    for (kind, x), tile, (convention, scale), element in itertools.product(
        inputs().items(), TILES, RULES, ("e4m3", "e5m2")
    ):
        if (tile is None and (convention, scale) != ("te", "fp32")) or (run.small and element == "e5m2"):
            continue
        where = f"{kind} as {element} in {tile} {scale} {convention}"
        slow = quantize_reference(x, tile, FORMATS[element], scale, convention, True)
        fast = kernels.quantize(x.to("cuda"), tile, element, scale, convention, True)
        decoded = fast and kernels.decode(fast[0], fast[1], tile)
        if fast is None or decoded is None:
            raise Skipped("there is no kernel for this device")
        found.hold("codes", where, fast[0], slow[0])
        found.hold("scales", where, fast[1], slow[1])
        for name in ("underflow", "saturated", "nonfinite", "amax"):
            ours, theirs = (getattr(made[2], name).float() for made in (fast, slow))
            found.hold("statistics", f"{where}, {name}", ours, theirs)
        found.hold("values", where, decoded, Quantized(slow[0], slow[1], tile).dequantize_reference(torch.bfloat16))
        run.found = {"compared": found.compared, "different": found.different, "first": found.first}
        run.keep()
