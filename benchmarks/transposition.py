"""Whether it costs training that the backward multiplies by another weight than the forward, and if the meter says so.

A language model of four decoder layers (hidden size 128, one byte a token) learns to tell stories. Its four linears a
layer read their operands as contracts say, in casts of `nemo_fp8.numerics`; sums, norms, attention, embedding and head
are in FP32. The learning rate falls to zero, and the loss is that of held-out stories, in the forward of the same arm.
Runs with one seed have the same first weights and the same data, and an arm is compared with its reference seed by
seed; an interval is Student's, of 95%, over the seeds' differences.

In the arms of one family the forward is the same, but for that of the square blocks, and only the copy of the weight
differs by which the backward multiplies:

    same codes       B = F            what backward="dequantized" multiplies by
    transposed       B                the weight's own cast along its rows: what a recipe with 1xN blocks does
    k times          F + k (B - F)    the same error, k times as large: what must show, if anything does
    k times, mixed   F + k S          S has the elements of B - F in another random order in every step: the same
                                      distance, and no bias

"NVFP4 weights" and "FP8 weights" quantize nothing but weights; "NVFP4" quantizes inputs and gradients, too, in 1x16
blocks to the nearest code, without the Hadamard transform.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.experiments.corpus import VOCABULARY, Stories
from nemo_fp8.mismatch.band import student_t
from nemo_fp8.numerics.quantize import quantize
from nemo_fp8.numerics.transposition import Copies, Transposition

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks/transposition.md"


@dataclass(frozen=True)
class Size:
    """What is trained, and for how long."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    length: int = 64
    batch: int = 8
    steps: int = 150
    rate: float = 2e-3
    held_out: int = 128


QUICK = Size(layers=2, hidden=64, length=32, batch=4, steps=6, held_out=8)


@dataclass(frozen=True)
class Arm:
    """One way to multiply: how the weight is stored for both of its GEMMs, and what else is quantized."""

    family: str
    name: str
    copies: Copies
    input: Operand | None = None
    grad: Operand | None = None
    dose: float = 1.0
    mixed: bool = False
    reference: bool = False
    """Whether the others of the family are compared with this one."""

    @property
    def is_recipe(self) -> bool:
        """Whether something trains so; the others are controls, which show what an error of their size does."""
        return self.dose == 1.0 and not self.mixed


MIXED = "NVFP4 weights"
"""The family that tells bias and noise apart."""


def arms() -> list[Arm]:
    """Return every arm, family by family."""
    # What helps a gradient in four bits, chance above all, adds noise to every arm, and takes most of the time.
    four = preset("bf16_with_nvfp4_mixed").replace(hadamard=False, stochastic_rounding=False)
    eight = Operand("e4m3", (128, 128), "fp32")
    fours = [_operand(four.replace(weight_block=block), "weight") for block in ("16x16", "1x16")]
    return [
        Arm("no cast", "FP32", Copies(None, None), reference=True),
        *_family("NVFP4 weights", *fours, doses=(8,)),
        *_family("FP8 weights", eight, replace(eight, block=(1, 128)), doses=(32,)),
        *_family("NVFP4", *fours, doses=(), input=_operand(four, "input"), grad=_operand(four, "grad")),
    ]


def _operand(precision: Precision, role: str) -> Operand:
    operand = precision.operand(role)
    assert operand is not None
    return operand


def _family(name: str, square: Operand, row: Operand, doses: tuple[float, ...], **others: Operand) -> Iterator[Arm]:
    block, rows = ("{}x{}".format(*operand.block or ()) for operand in (square, row))
    yield Arm(name, block, Copies(square, square), **others)
    yield Arm(name, f"{rows}, same codes", Copies(row, row, shared=True), reference=True, **others)
    yield Arm(name, f"{rows}, transposed", Copies(row, row), **others)
    for dose in doses:
        yield Arm(name, f"{rows}, {dose} times", Copies(row, row), dose=dose, **others)
    if name == MIXED:
        yield Arm(name, f"{rows}, {dose} times, mixed", Copies(row, row), dose=dose, mixed=True, **others)


# ---------------------------------------------------------------------- the model


class _Linear(torch.autograd.Function):
    """``x @ F.t()``, whose backward multiplies by B."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, arm: Arm, generator: torch.Generator) -> torch.Tensor:
        forward, backward = _copies(weight, arm, generator)
        tokens = x.reshape(-1, x.shape[-1])
        ctx.arm, ctx.shape = arm, x.shape
        ctx.save_for_backward(_cast(tokens, arm.input, "col"), backward)
        return (_cast(tokens, arm.input, "row") @ forward.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, backward = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1])
        dx = _cast(dy, ctx.arm.grad, "row") @ backward
        return dx.view(ctx.shape), _cast(dy, ctx.arm.grad, "col").t() @ x, None, None


def _copies(weight: torch.Tensor, arm: Arm, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    forward, backward = arm.copies.values(weight)
    if arm.dose == 1.0 and not arm.mixed:
        return forward, backward
    error = backward - forward
    if arm.mixed:
        error = error.flatten()[torch.randperm(error.numel(), generator=generator)].view(error.shape)
    return forward, forward + arm.dose * error


def _cast(x: torch.Tensor, operand: Operand | None, usage: str) -> torch.Tensor:
    return x if operand is None else quantize(x.bfloat16(), operand, usage=usage).dequantize()


class Linear(torch.nn.Module):
    """A linear without bias, in the ways of an arm. It keeps the last gradient of its output if it is told to."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outside, inside) * inside**-0.5)
        self.arm, self.keeps = arms()[0], False
        self.generator = torch.Generator().manual_seed(0)
        self.dy: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Linear.apply(x, self.weight, self.arm, self.generator)  # type: ignore[no-untyped-call]
        if self.keeps:
            y.register_hook(lambda dy: setattr(self, "dy", dy.detach()))
        return y


class Layer(torch.nn.Module):
    """Attention and an MLP, each behind an RMSNorm and beside a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        h = size.hidden
        self.heads, self.norms = size.heads, torch.nn.ModuleList(torch.nn.RMSNorm(h) for _ in range(2))
        self.qkv, self.proj, self.up, self.down = Linear(h, 3 * h), Linear(h, h), Linear(h, 2 * h), Linear(2 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, h = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, h)
        x = x + self.proj(a)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(torch.nn.Module):
    """A decoder of bytes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, size.hidden)
        self.position = torch.nn.Parameter(torch.randn(size.length, size.hidden) * 0.02)
        self.layers = torch.nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm, self.head = torch.nn.RMSNorm(size.hidden), torch.nn.Linear(size.hidden, VOCABULARY, bias=False)
        torch.nn.init.normal_(self.embedding.weight, std=0.02)
        torch.nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())

    def linears(self) -> dict[str, Linear]:
        return {name: module for name, module in self.named_modules() if isinstance(module, Linear)}

    def take(self, arm: Arm) -> None:
        for linear in self.linears().values():
            linear.arm = arm


def _batch(split: str, seed: int, first: int, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    stories = Stories(split, first + count, length, seed)
    samples = [stories[i] for i in range(first, first + count)]
    return torch.stack([s["tokens"] for s in samples]), torch.stack([s["labels"] for s in samples])


# ---------------------------------------------------------------------- one run


def run(arm: Arm, seed: int, size: Size) -> dict[str, Any]:
    """Train one arm with one seed; return its losses and what the meter says at the end."""
    torch.set_num_threads(1)
    started = time.process_time()
    torch.manual_seed(seed)
    model = Model(size)
    model.take(arm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(1, size.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm, 0.5 * (1 + math.cos(math.pi * min(1.0, i / size.steps))))
    )
    losses, earlier = [], {}
    for step in range(size.steps):
        loss = model(*_batch("train", seed, step * size.batch, size.batch, size.length))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step == size.steps // 2:
            earlier = {name: _error(linear.weight, arm) for name, linear in model.linears().items()}
    told = {"family": arm.family, "arm": arm.name, "seed": seed, "loss": _held_out(model, seed, size)}
    told["curve"] = [round(mean(part), 4) for part in _parts(losses, 10)]
    told |= _meter(model, arm, seed, size, earlier)
    return told | {"seconds": round(time.process_time() - started, 1)}


def _parts(values: list[float], width: int) -> Iterator[list[float]]:
    for first, end in pairwise([*range(0, len(values), width), len(values)]):
        yield values[first:end]


@torch.no_grad()
def _held_out(model: Model, seed: int, size: Size) -> float:
    """Return the loss on stories that no run trains on, the same for all arms of a seed."""
    return round(float(model(*_batch("validation", seed, 0, size.held_out, size.length))), 5)


def _error(weight: torch.Tensor, arm: Arm) -> torch.Tensor:
    forward, backward = _copies(weight.detach(), replace(arm, dose=1.0, mixed=False), torch.Generator())
    return backward - forward


def _meter(
    model: Model, arm: Arm, seed: int, size: Size, earlier: dict[str, torch.Tensor]
) -> dict[str, dict[str, float | None]]:
    """Return what the meter says of the trained weights, of the gradients of one batch, and of the whole model's
    gradient.

    ``weights`` are all of them as one, ``gradients`` the products of all linears as one; ``whole`` is the gradient of
    all parameters, against the one that F gives; ``stays`` the cosine of B - F now with the one at half of the run.
    """
    tokens = _batch("validation", seed, size.held_out, size.batch, size.length)
    gradients = []
    for way in (replace(arm, copies=replace(arm.copies, shared=True), dose=1.0, mixed=False), arm):
        model.take(way)
        for linear in model.linears().values():
            linear.keeps = way is not arm
        model.zero_grad()
        model(*tokens).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    weights, products, before, now = [], [], [], []
    for name, linear in model.linears().items():
        assert linear.dy is not None
        w, dy = linear.weight.detach(), linear.dy.flatten(0, -2)
        forward, backward = _copies(w, arm, linear.generator)
        weights.append(Transposition.of(w, forward, backward))
        dx = dy @ forward
        products.append(Transposition.of(dx, dx, dy @ backward))
        before.append(earlier[name].flatten())
        now.append(_error(linear.weight, arm).flatten())
    stays = F.cosine_similarity(torch.cat(before), torch.cat(now), 0)
    return {
        "weights": Transposition.together(weights).to_dict(),
        "gradients": Transposition.together(products).to_dict(),
        "whole": Transposition.of(gradients[0], *gradients).to_dict(),
        "stays": {"cosine": float(stays)},
    }


# ---------------------------------------------------------------------- all of them


def take(seeds: list[int], size: Size, workers: int, kept: Path | None) -> list[dict[str, Any]]:
    """Run every arm with every seed, ``workers`` at a time; those in the file ``kept`` are not run again."""
    done = [json.loads(line) for line in kept.read_text().splitlines()] if kept and kept.exists() else []
    known = {(row["family"], row["arm"], row["seed"]) for row in done}
    families = list(dict.fromkeys(arm.family for arm in arms()))
    order = [(arm, seed) for family in families for seed in seeds for arm in arms() if arm.family == family]
    todo = [(arm, seed) for arm, seed in order if (arm.family, arm.name, seed) not in known]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run, arm, seed, size) for arm, seed in todo]):
            row = future.result()
            print(f"{row['family']}, {row['arm']}, seed {row['seed']}: {row['loss']}", file=sys.stderr, flush=True)
            done.append(row)
            if kept:
                with kept.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    of = {(row["family"], row["arm"], row["seed"]): row for row in done}
    return [of[arm.family, arm.name, seed] for arm in arms() for seed in seeds]


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean of some values, and half the width of its 95% interval."""
    if len(values) < 2:
        return mean(values), math.inf
    return mean(values), student_t(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))


def compared(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each arm: its loss, its gaps to the family's reference in percent, and the meter's numbers."""
    references = {arm.family: arm.name for arm in arms() if arm.reference}
    rows = []
    for arm in arms():
        mine = [row for row in runs if (row["family"], row["arm"]) == (arm.family, arm.name)]
        if not mine:
            continue
        found = gaps(runs, arm.family, arm.name, references[arm.family])
        middle, half = interval(found)
        meter = {
            f"{part}_{name}": mean(row[part][name] for row in mine)
            for part in ("weights", "gradients", "whole", "stays")
            for name in mine[0][part]
        }
        rows.append(
            {"family": arm.family, "arm": arm.name, "reference": arm.reference, "is_recipe": arm.is_recipe}
            | {"loss": mean(row["loss"] for row in mine), "gaps": found, "gap": middle, "half": half, **meter}
        )
    return rows


def gaps(runs: list[dict[str, Any]], family: str, arm: str, other: str) -> list[float]:
    """Return by how many percent an arm's loss is above another's, seed by seed."""
    losses = {(row["arm"], row["seed"]): row["loss"] for row in runs if row["family"] == family}
    return [100 * (losses[arm, seed] / losses[other, seed] - 1) for name, seed in losses if name == arm]


def _is_turned(row: dict[str, Any]) -> bool:
    return str(row["arm"]).endswith("transposed")


def _is_square(row: dict[str, Any]) -> bool:
    return "," not in row["arm"]


def correlation(rows: list[dict[str, Any]]) -> float:
    """Return Pearson's correlation of distance and gap over all seeds of some arms."""
    pairs = [(row["weights_distance"], gap) for row in rows for gap in row["gaps"]]
    x, y = torch.tensor(pairs, dtype=torch.float64).t()
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def tables(runs: list[dict[str, Any]]) -> str:
    """Return the tables of the page."""
    rows = compared(runs)
    out = [
        "| family | weight of the backward | differ | distance | gain | error of dx | cosine of the whole gradient | "
        "loss | gap to the same codes |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        gap = "" if row["reference"] else f"{row['gap']:+.2f} % ± {row['half']:.2f}"
        out.append(
            f"| {row['family']} | {row['arm']} | {row['weights_differ_percent']:.1f} % | "
            f"{100 * row['weights_distance']:.1f} % | {100 * row['weights_gain']:+.2f} % | "
            f"{100 * row['gradients_distance']:.1f} % | {row['whole_cosine']:.4f} | {row['loss']:.4f} | {gap} |"
        )
    out += ["", "| family | what an interval tells apart from the same codes | what it does not |", "|---|---|---|"]
    for family in dict.fromkeys(row["family"] for row in rows[1:]):
        mine = [row for row in rows if row["family"] == family and not row["reference"]]
        apart = [row["arm"] for row in mine if abs(row["gap"]) > row["half"]]
        out.append(f"| {family} | {'; '.join(apart)} | {'; '.join(r['arm'] for r in mine if r['arm'] not in apart)} |")
    out += ["", "| family | 1xN blocks, transposed, against square blocks |", "|---|---:|"]
    for family in dict.fromkeys(row["family"] for row in rows[1:]):
        square, turned = (row for row in rows if row["family"] == family and (_is_square(row) or _is_turned(row)))
        middle, half = interval(gaps(runs, family, turned["arm"], square["arm"]))
        out.append(f"| {family} | {middle:+.2f} % ± {half:.2f} |")
    out += ["", "| family | arms | correlation of distance and gap |", "|---|---|---:|"]
    for family in dict.fromkeys(row["family"] for row in rows[1:]):
        mine = [row for row in rows if row["family"] == family]
        recipes = [row for row in mine if row["is_recipe"]]
        for name, chosen in (("recipes", recipes), ("recipes and controls", mine)):
            if name == "recipes and controls" and len(mine) == len(recipes):
                continue
            out.append(f"| {family} | {name} | {correlation(chosen):+.2f} |")
    stays = mean(row["stays_cosine"] for row in rows if _is_turned(row))
    out += ["", f"B - F at the end of a run and at half of it: cosine {stays:.2f}, mean of the transposed arms."]
    return "\n".join(out)


def page(record: dict[str, Any]) -> str:
    """Return the page."""
    out = ["# Does the meter of transposition predict the loss?", ""]
    out += ["Written by `benchmarks/transposition.py`; do not edit. What is read in it:"]
    out += ["[What FP8 and NVFP4 do to a checkpoint](../inspect.md#what-the-backward-multiplies-by).", ""]
    out += [f"- {key}: {value}" for key, value in record["about"].items()]
    out += ["", *(__doc__ or "").split("\n", 2)[-1].strip().split("\n"), "", "## By arm", "", tables(record["runs"])]
    out += ["", "```text", record["about"]["command"], "```", ""]
    out += [f"![{PICTURE}](../pictures/transposition.svg)", ""]
    return "\n".join(out)


PICTURE = "Gap of the held-out loss to the same codes by the distance of the weights, with 95% intervals"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--quick", action="store_true", help="a few steps of a smaller model, to see that all runs")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1)), help="runs at a time")
    parser.add_argument("--runs", type=Path, metavar="FILE", help="keep each run there, and go on after those in it")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)} and the JSON beside it")
    options = parser.parse_args()
    size = QUICK if options.quick else Size()
    runs = take(list(range(1, options.seeds + 1)), size, options.workers, options.runs)
    record = {
        "about": {
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} processors, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
            "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
            "model": ", ".join(f"{name} {value}" for name, value in asdict(size).items()),
            "command": f"python benchmarks/transposition.py --seeds {options.seeds} --write",
        },
        "arms": compared(runs),
        "runs": runs,
    }
    print(tables(runs))
    if options.write:
        PAGE.write_text(page(record))
        text = json.dumps(record | {"runs": None}, indent=1)
        lines = ",\n".join(json.dumps(row) for row in runs)
        PAGE.with_suffix(".json").write_text(text.replace('"runs": null', f'"runs": [\n{lines}\n]') + "\n")


if __name__ == "__main__":
    main()
