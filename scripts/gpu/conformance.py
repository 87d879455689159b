"""TransformerEngine's bits: recorded as golden vectors, compared live at full size; and our kernels against our
reference.

    python3 scripts/gpu/conformance.py            on a GPU, with TE: golden vectors of its CUDA kernels
    python scripts/gpu/conformance.py --cpu       golden vectors of TE's own Python reference (from .te), everything
                                                  else small

Golden vectors go to the folder of the record; ``scripts/gpu/report.py`` puts them into tests/golden, where the CPU
tests hold nemo_fp8.numerics to them (the format is in tests/golden/golden.py). Who records is in recorders.py.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "scripts" / "gpu", ROOT / "tests" / "golden", ROOT / "tests" / "numerics"):
    sys.path.insert(0, str(folder))

from common import Run, Skipped, require_te, result_of, table, te_version, why_not  # noqa: E402
from golden import RANKS, STEPS, Golden, delayed_inputs, hold, inputs, operand_of  # noqa: E402
from kernel_cases import values  # noqa: E402
from recorders import Pair, on_ranks, python_case, te_case, te_kernels, te_python  # noqa: E402

from nemo_fp8.contract import Operand  # noqa: E402
from nemo_fp8.numerics import kernels  # noqa: E402
from nemo_fp8.numerics.formats import FORMATS  # noqa: E402
from nemo_fp8.numerics.quantize import quantize, quantize_reference  # noqa: E402
from nemo_fp8.numerics.quantized import Quantized  # noqa: E402

# file -> (block, kind of scale) of the operands in it
RECIPES: dict[str, list[tuple[tuple[int, int] | None, str]]] = {
    "tensorwise": [(None, "fp32"), (None, "pow2")],
    "blockwise_fp32": [((1, 128), "fp32"), ((128, 128), "fp32")],
    "blockwise_pow2": [((1, 128), "pow2"), ((128, 128), "pow2")],
    "mxfp8": [((1, 32), "e8m0")],
}
# TE's Python is a specification for finite values; its E5M2 cast and its FP32 scale of a tiny amax are torch's.
PYTHON_INPUTS = ("gaussian.bf16", "gaussian.fp16", "magnitudes.fp32")
DELAYED = [
    {"format": "hybrid", "history_len": 4, "algo": "max", "margin": 0},
    {"format": "hybrid", "history_len": 4, "algo": "most_recent", "margin": 1},
    {"format": "e4m3", "history_len": 1, "algo": "most_recent", "margin": 0},
]
LIVE = {
    "activation 8192 x 14336": (8192, 14336),
    "weight 14336 x 4096": (14336, 4096),
    "ragged 4104 x 4112": (4104, 4112),
}
LIVE_CPU = {"activation 256 x 512": (256, 512), "ragged 264 x 272": (264, 272)}
RULES = [("te", "fp32"), ("te", "pow2"), ("deepgemm", "fp32"), ("deepgemm", "pow2"), ("te", "e8m0")]
OWN_SECONDS = 60.0  # for our kernels against our reference: most of it is compiling
TILES = [(128, 128), (1, 128), (128, 1), (1, 32), (32, 1)]

Quantize = Callable[[torch.Tensor, Operand, str], Pair]


# ---------------------------------------------------------------------- recording


def record(
    run: Run, file: str, source: str, quantize_by: Quantize, names: tuple[str, ...], *recipes: str
) -> dict[str, Any]:
    """One file of quantized tensors; a case that its source refuses is named with the reason, and left out."""
    golden, left_out = Golden(_about(run, source)), {}
    given = {name: x for name, x in inputs().items() if name in names}
    for recipe in recipes:
        for (block, scale), element, name in itertools.product(RECIPES[recipe], ("e4m3", "e5m2"), given):
            if element == "e5m2" and name not in (names[0], "specials.bf16"):
                continue
            for usage in ("row",) if block is None or block[0] == block[1] else ("row", "col"):
                shown = "tensor" if block is None else "x".join(map(str, block))
                case = {
                    "name": f"{shown}.{scale}.{element}.{usage}.{name}",
                    "kind": "quantize",
                    "input": name,
                    "operand": {"format": element, "block": block, "scale": scale},
                    "usage": usage,
                }
                try:
                    codes, scale_inv = (
                        t.cpu() for t in quantize_by(given[name].to(run.device), operand_of(case), usage)
                    )
                except (
                    Skipped,
                    RuntimeError,
                ) as refused:  # at once, not in some later call: what was recorded before stays good
                    left_out[case["name"]] = f"{type(refused).__name__}: {str(refused).strip()[:200]}"
                    continue
                golden.cases.append(case)
                golden.tensors |= {
                    f"{case['name']}/codes": codes,
                    f"{case['name']}/scale_inv": scale_inv,
                    f"inputs/{name}": given[name],
                }
    return save(run, file, golden, left_out)


def record_delayed(golden: Golden, one: Callable[..., dict[str, torch.Tensor]], zeros: bool) -> Golden:
    """The cases of delayed scaling, on two ranks."""
    golden.tensors |= {
        f"inputs/delayed/{step}/{key}": x for step, given in delayed_inputs(zeros) for key, x in given.items()
    }
    about = {"kind": "delayed", "steps": STEPS, "ranks": RANKS}
    cases = [{"name": f"delayed.{number}"} | about | settings for number, settings in enumerate(DELAYED)]
    for case, *kept in zip(cases, *on_ranks(one, cases), strict=True):
        for key in kept[0].keys() & kept[1].keys():  # the state after a step, which the ranks share
            same = torch.equal(kept[0][key].view(torch.int32), kept[1][key].view(torch.int32))
            assert same, f"the ranks disagree on {case['name']}/{key}: {kept[0][key]} and {kept[1][key]}"
        golden.tensors |= {f"{case['name']}/{key}": t for found in kept for key, t in found.items()}
    golden.cases += cases
    return golden


def save(run: Run, file: str, golden: Golden, left_out: dict[str, str]) -> dict[str, Any]:
    """Write the file, and hold our numerics to it at once, on this device and on the CPU."""
    if not golden.cases:
        reason = next(iter(left_out.values()), "no case")
        raise (
            Skipped(reason.removeprefix("Skipped: "))
            if reason.startswith("Skipped")
            else RuntimeError(f"nothing was recorded: {reason}")
        )
    size = golden.save(run.folder / f"{file}.safetensors")
    golden = Golden.load(run.folder / f"{file}.safetensors")
    rows, first = {}, {}
    for device in dict.fromkeys(("cpu", run.device)):
        found = [(case["name"], hold(golden, case, device)) for case in golden.cases]
        rows[device] = [sum(d.compared.get(what, 0) for _, d in found) for what in ("codes", "scales", "histories")]
        rows[device].append(sum(d.total for _, d in found))
        first |= {f"{name} on {device}": str(d) for name, d in found if d.total}
    return {"bytes": size, "cases": len(golden.cases), "compared": rows, "different": first, "left_out": left_out}


def _about(run: Run, source: str) -> dict[str, str]:
    about = run.record["about"]
    return {
        "source": source,
        "date": about["date"],
        "command": about["command"],
        "versions": json.dumps(about["versions"]),
    }


# ---------------------------------------------------------------------- live


def live(run: Run, quantize_by: Quantize) -> dict[str, Any]:
    """TE beside us on the same device, at the sizes of a model: how many codes and scales differ."""
    found: dict[str, Any] = {}
    for (what, shape), (recipe, kinds) in itertools.product((LIVE_CPU if run.cpu else LIVE).items(), RECIPES.items()):
        x = torch.randn(shape, device=run.device).mul_(torch.randn(shape[0], 1, device=run.device).exp()).bfloat16()
        for (block, scale), usage in itertools.product(kinds, ("row", "col")):
            if usage == "col" and (block is None or block[0] == block[1]):
                continue
            name = f"{what}, {recipe} {'tensor' if block is None else 'x'.join(map(str, block))} {scale} {usage}"
            operand = Operand("e4m3", block, scale)
            try:
                codes, scale_inv = quantize_by(x, operand, usage)
            except (Skipped, RuntimeError) as refused:
                found[name] = {"skipped": str(refused).strip()[:200]}
                continue
            ours = quantize(x, operand, usage=usage)
            mine = ours.scale_inv if ours.scale_inv.dtype == torch.float32 else ours.scale_inv.view(torch.uint8)
            found[name] = {
                "codes": codes.numel(),
                "codes_different": int((ours.data.view(torch.uint8) != codes).sum()),
                "scales": scale_inv.numel(),
                "scales_different": int((mine.reshape(scale_inv.shape) != scale_inv).sum()),
            }
    return found


def own_kernels(run: Run) -> dict[str, Any]:
    """This device's kernels against our reference in torch on the CPU: codes and scales to the bit, counts exactly,
    sums to 1e-5.

    Most of the time goes into compiling; so much is compared as OWN_SECONDS allow.
    """
    shape = (133, 140) if run.cpu else (261, 300)
    totals = {"tensors": 0, "codes": 0, "scales": 0, "different": 0, "statistics_different": 0}
    worst, first = 0.0, ""
    kinds = ("gaussian", "magnitudes", "specials", "zero", "bits")
    every = [
        case
        for case in itertools.product(
            [*TILES, None], RULES, (torch.bfloat16, torch.float16, torch.float32), ("e4m3", "e5m2"), kinds
        )
        if (case[0] is not None or case[1][1] == "fp32")
        and (case[2] == torch.bfloat16 or (case[1][0] == "te" and case[3] == "e4m3"))  # each is a kernel to compile
    ]
    random.Random(0).shuffle(every)  # so that whatever is reached in time is some of everything
    decoded, began = _decode(run), time.monotonic()
    for number, (tile, (convention, scale), dtype, element, kind) in enumerate(every):
        enough = number == 25 if run.cpu else time.monotonic() - began > OWN_SECONDS
        if enough:
            break
        x = values(shape, dtype, totals["tensors"], kind)
        slow = quantize_reference(x, tile, FORMATS[element], scale, convention, True)
        fast = kernels.quantize(x.to(run.device), tile, element, scale, convention, True)
        if fast is None:
            raise Skipped("there is no kernel for this device")
        here = f"{kind} {dtype} as {element} in {tile} {scale} {convention}"
        wrong = _bytes_differ(fast[0], slow[0]) + _bytes_differ(fast[1], slow[1])
        totals["tensors"] += 1
        totals["codes"] += slow[0].numel()
        totals["scales"] += slow[1].numel()
        totals["different"] += wrong
        assert fast[2] is not None
        assert slow[2] is not None
        counts = [
            n
            for n in ("underflow", "saturated", "nonfinite", "amax", "least_code", "largest_code")
            if _unequal(fast[2], slow[2], n)
        ]
        totals["statistics_different"] += len(counts)
        if kind == "gaussian":
            off = ((fast[2].signal.cpu() - slow[2].signal).abs() / slow[2].signal.clamp_min(1e-30)).max()
            worst = max(worst, float(off))
        if (wrong or counts) and not first:
            first = f"{here}: {wrong} bytes, {counts}"
    return totals | {
        "of": len(every),
        "largest_relative_error_of_sums": worst,
        "first": first,
        "shape": shape,
        "decode": decoded,
    }


def _decode(run: Run) -> dict[str, int]:
    """Every code under scales of every magnitude, back to FP32 and BF16."""
    found = {"values": 0, "different": 0}
    for element, tile, kind in itertools.product(("e4m3", "e5m2"), [*TILES, None], ("fp32", "e8m0")):
        codes = torch.arange(256, dtype=torch.uint8).repeat(80)[: 130 * 140].view(130, 140).view(FORMATS[element].dtype)
        scale_inv = quantize_reference(
            values((130, 140), torch.float32, 4, "magnitudes"), tile, FORMATS[element], kind
        )[1]
        for dtype in (torch.float32, torch.bfloat16):
            slow = Quantized(codes, scale_inv, tile).dequantize_reference(dtype)
            fast = kernels.decode(codes.to(run.device), scale_inv.to(run.device), tile, dtype)
            if fast is None:
                raise Skipped("there is no kernel for this device")
            fast = fast.cpu()
            found["values"] += slow.numel()
            found["different"] += int((~((fast == slow) | (fast.isnan() & slow.isnan()))).sum())
    return found


def _bytes_differ(fast: torch.Tensor, slow: torch.Tensor) -> int:
    return int((fast.cpu().reshape(-1).view(torch.uint8) != slow.reshape(-1).view(torch.uint8)).sum())


def _unequal(fast: Any, slow: Any, name: str) -> bool:
    return not torch.equal(getattr(fast, name).cpu().double(), getattr(slow, name).double())


# ---------------------------------------------------------------------- telling


def tell(record: dict[str, Any]) -> str:
    """The tables of a record."""
    rows = []
    for name, part in record["parts"].items():
        if name.startswith("golden"):
            found = part.get("result")
            if not found:
                rows.append([name.removeprefix("golden "), *[None] * 6, why_not(part)])
                continue
            for device, counts in found["compared"].items():
                rows.append(
                    [
                        name.removeprefix("golden "),
                        found["cases"],
                        len(found["left_out"]),
                        device,
                        *(f"{n:,}" for n in counts),
                    ]
                )
    out = [
        "Golden vectors, and nemo_fp8 held to them:",
        "",
        table(["file", "cases", "left out", "on", "codes", "scales", "histories", "different"], rows),
    ]
    for name, part in record["parts"].items():
        if not name.startswith("golden") or not part.get("result"):
            continue
        found = part["result"]
        said = [*found["different"].values(), *(f"{case}: {why}" for case, why in found["left_out"].items())]
        if said:
            out += ["", f"{name.removeprefix('golden ')}:", "", *(f"- {text}" for text in said[:8])]
        if len(said) > 8:
            out.append(f"- and {len(said) - 8} more, in the record")
    beside = result_of(record, "live")
    if beside:
        lines = [
            [name, f"{r['codes']:,}", f"{r['codes_different']:,}", f"{r['scales']:,}", f"{r['scales_different']:,}"]
            if "codes" in r
            else [name, None, None, None, r["skipped"]]
            for name, r in beside.items()
        ]
        out += [
            "",
            "Beside it on the same device:",
            "",
            table(["tensor", "codes", "different", "scales", "different"], lines),
        ]
    own = result_of(record, "own kernels")
    if own:
        down, across = own["shape"]
        out += [
            "",
            f"Our kernels against our reference: {own['tensors']:,} of {own['of']:,} tensors of {down} x {across}, "
            f"{own['codes']:,} codes and {own['scales']:,} scales, {own['different']:,} bytes different; "
            f"{own['statistics_different']:,} counts of statistics different, "
            f"sums within {own['largest_relative_error_of_sums']:.1e}; {own['decode']['values']:,} values decoded, "
            f"{own['decode']['different']:,} different. {own['first']}".rstrip(),
        ]
    return "\n".join(out)


def main() -> None:
    run = Run("conformance", __doc__)
    version = te_version()
    if run.cpu:
        source = f"TransformerEngine {run.record['about']['versions'].get('transformer-engine')}, its Python reference on a CPU"

        def python_reference() -> dict[str, Any]:
            file = run.folder / "te_python_reference.safetensors"
            done = record(
                run, file.stem, source, te_python, PYTHON_INPUTS, "tensorwise", "blockwise_fp32", "blockwise_pow2"
            )
            return save(run, file.stem, record_delayed(Golden.load(file), python_case, zeros=False), done["left_out"])

        run.part("golden te_python_reference", python_reference, seconds=120)
    else:
        source = f"TransformerEngine {version}, its CUDA kernels on {torch.cuda.get_device_name()}"
        for recipe in RECIPES:
            run.part(
                f"golden {recipe}",
                lambda recipe=recipe: record(run, recipe, source, te_kernels, tuple(inputs()), recipe),
            )

        def te_delayed() -> dict[str, Any]:
            require_te()
            return save(run, "delayed", record_delayed(Golden(_about(run, source)), te_case, zeros=True), {})

        run.part("golden delayed", te_delayed, seconds=100)
    run.part("own kernels", lambda: own_kernels(run), seconds=OWN_SECONDS + 40)
    run.part("live", lambda: live(run, te_python if run.cpu else te_kernels), seconds=60)
    run.finish(tell)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
