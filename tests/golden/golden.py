"""Golden vectors: what somebody else's quantizer made of known inputs, in files, and nemo_fp8 held to them bit for bit.

A file is safetensors. Its metadata says who made it (``source``), when and how, and lists its cases as JSON:

    quantize   input, operand {format, block, scale}, usage
               tensors  inputs/<input>,  <name>/codes (bytes, of the input's shape),  <name>/scale_inv (as
                        numerics.Quantized holds it)
    delayed    format, history_len, algo, margin, steps, ranks: several steps of one linear, amaxes reduced over the
               ranks
               tensors  inputs/delayed/<step>/<rank>/<role>,
                        <name>/<step>/<rank>/<role> with .amax, .codes and .scale_inv as far as the source tells them,
                        <name>/<step>/<direction> with .scale [roles] and .history [history_len, roles] after the step

Whoever records brings other people's layouts (transposed data, padded scales) into ours, by moving and never by
computing. Nothing but :func:`hold` calls nemo_fp8. ``recording.py`` records with this file, and the tests read with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

FOLDER = Path(__file__).parent
ROLES = {"forward": ("input", "weight"), "backward": ("grad",)}


@dataclass
class Golden:
    """One file: who made it, its cases, its tensors."""

    about: dict[str, str]
    cases: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def save(self, path: Path) -> int:
        """Write the file; its size in bytes."""
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.tensors.items()}
        save_file(tensors, path, metadata=self.about | {"cases": json.dumps(self.cases)})
        return path.stat().st_size

    @classmethod
    def load(cls, path: Path) -> Golden:
        with safe_open(path, "pt") as file:
            about = dict(file.metadata())
            return cls(about, json.loads(about.pop("cases")), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


@dataclass
class Differences:
    """How many values were compared, how many differ in their bits, and where the first of them is."""

    compared: dict[str, int] = field(default_factory=dict)
    different: dict[str, int] = field(default_factory=dict)
    first: str = ""

    def hold(self, what: str, where: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Count the differences; a NaN in FP32 or BF16 differs from no NaN."""
        assert ours.shape == theirs.shape, (
            f"{where}: {what} of shape {tuple(ours.shape)}, recorded {tuple(theirs.shape)}"
        )
        ours, theirs = ours.detach().cpu().contiguous(), theirs.contiguous()
        wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[theirs.itemsize]
        wrong = ours.view(wide) != theirs.view(wide)
        if theirs.dtype in (torch.float32, torch.bfloat16):
            wrong &= ~(ours.isnan() & theirs.isnan())
        self.compared[what] = self.compared.get(what, 0) + theirs.numel()
        self.different[what] = self.different.get(what, 0) + int(wrong.sum())
        if bool(wrong.any()) and not self.first:
            at = tuple(wrong.nonzero()[0].tolist())
            bits = f"{int(ours.view(wide)[at]) & 0xFFFFFFFF:#x} instead of {int(theirs.view(wide)[at]) & 0xFFFFFFFF:#x}"
            self.first = f"{where}: {what}{list(at)} is {ours[at].item()!r} ({bits}), recorded {theirs[at].item()!r}"

    @property
    def total(self) -> int:
        return sum(self.different.values())

    def __str__(self) -> str:
        counts = ", ".join(f"{n:,} of {self.compared[what]:,} {what} differ" for what, n in self.different.items())
        return f"{counts}{f'; first {self.first}' if self.first else ''}"


def files(folder: Path = FOLDER) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def hold(golden: Golden, case: dict[str, Any], device: str = "cpu") -> Differences:
    """nemo_fp8 on one case of a file."""
    return {"quantize": _hold_quantize, "delayed": _hold_delayed}[case["kind"]](golden, case, device)


def _hold_quantize(golden: Golden, case: dict[str, Any], device: str) -> Differences:
    from nemo_fp8.numerics.quantize import quantize

    name, found = case["name"], Differences()
    q = quantize(golden.tensors[f"inputs/{case['input']}"].to(device), operand_of(case), usage=case["usage"])
    found.hold("codes", name, _bytes(q.data), golden.tensors[f"{name}/codes"])
    scale_inv = q.scale_inv if q.scale_inv.dtype == torch.float32 else _bytes(q.scale_inv)
    found.hold("scales", name, scale_inv, golden.tensors[f"{name}/scale_inv"])
    return found


def _hold_delayed(golden: Golden, case: dict[str, Any], device: str) -> Differences:
    from nemo_fp8.numerics.delayed import DelayedState

    precision, found = precision_of(case), Differences()
    ranks = [DelayedState(precision, device) for _ in range(case["ranks"])]
    for step in range(case["steps"]):
        at = f"{case['name']}/{step}"
        for direction, role in ((d, r) for d, roles in ROLES.items() for r in roles):
            operand = precision.operand(role)
            assert operand is not None
            for rank, state in enumerate(ranks):
                key = f"{at}/{rank}/{role}"
                scaling = getattr(state, direction)
                q = scaling.quantize(golden.tensors[f"inputs/delayed/{step}/{rank}/{role}"].to(device), role, operand)
                amax = scaling.history[0, scaling.roles.index(role)]
                for what, ours, kind in (
                    ("amax", amax, "amaxes"),
                    ("codes", _bytes(q.data), "codes"),
                    ("scale_inv", q.scale_inv, "scales"),
                ):
                    if f"{key}.{what}" in golden.tensors:
                        found.hold(kind, key, ours, golden.tensors[f"{key}.{what}"])
        for direction in ROLES:
            reduced = torch.stack([getattr(state, direction).history[0] for state in ranks]).amax(0)
            for state in ranks:
                getattr(state, direction).update(reduced)
                for what, kind in (("scale", "scales"), ("history", "histories")):
                    ours, theirs = getattr(getattr(state, direction), what), golden.tensors[f"{at}/{direction}.{what}"]
                    found.hold(kind, f"{at}/{direction}", ours, theirs)
    return found


def operand_of(case: dict[str, Any]) -> Any:
    from nemo_fp8.contract import Operand

    o = case["operand"]
    return Operand(o["format"], None if o["block"] is None else tuple(o["block"]), o["scale"])


def precision_of(case: dict[str, Any]) -> Any:
    from nemo_fp8.contract import Precision

    return Precision(
        format=case["format"],
        scaling="delayed",
        margin=case["margin"],
        amax_history_len=case["history_len"],
        amax_compute_algo=case["algo"],
    )


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


# ---------------------------------------------------------------------- inputs


def inputs() -> dict[str, torch.Tensor]:
    """What is quantized: ordinary values; every magnitude with subnormals and zeros, ragged; and NaN and infinities
    among them."""
    g = torch.Generator().manual_seed(20)
    ragged = (136, 144)  # more than a tile and less than two each way, and still sides that TE's GEMMs take

    def magnitudes(dtype: torch.dtype, low: int, high: int) -> torch.Tensor:
        x = torch.ldexp(torch.randn(ragged, generator=g), torch.randint(low, high, (ragged[0], 1), generator=g))
        x = x.to(dtype).nan_to_num(nan=0.0, posinf=torch.finfo(dtype).max, neginf=torch.finfo(dtype).min)
        x[torch.rand(ragged, generator=g) < 0.1] = 0
        x[128:, 128:] = 0  # a tile of zeros
        x[5] = 0
        x[6] = torch.finfo(dtype).smallest_normal / 8  # a row of subnormals
        return x

    found = {
        "gaussian.bf16": torch.randn(128, 128, generator=g).bfloat16(),
        "gaussian.fp16": torch.randn(128, 128, generator=g).half(),
        "magnitudes.bf16": magnitudes(torch.bfloat16, -133, 126),
        "magnitudes.fp32": magnitudes(torch.float32, -149, 126),
    }
    special = torch.randn(ragged, generator=g).bfloat16()
    for value, many in ((float("nan"), 20), (-float("nan"), 20), (float("inf"), 3), (-float("inf"), 3)):
        special.view(-1)[torch.randint(special.numel(), (many,), generator=g)] = value
    special[7] = float("nan")
    found["specials.bf16"] = special
    found["nan.bf16"] = torch.where(
        special.isinf(), 1.0, special
    )  # NaN alone: it must move no scale, where an infinity does
    return found


INFINITE = float("inf")
# How large a delayed operand is in each step: it grows, shrinks, vanishes, and holds an infinity once.
SIZES = {
    "input": (1.0, 3.0, 200.0, 0.0, 0.02, INFINITE, 1e-38, 5.0),
    "weight": (0.02,) * 8,
    "grad": (1e-3, 1e-5, 0.0, 1e4, 1e-7, 1.0, 1e-39, 2.0),
}
SHAPES = {"input": (16, 48), "weight": (32, 48), "grad": (16, 32)}
STEPS, RANKS = 8, 2


def delayed_inputs(zeros: bool = True) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """For each step the tensors of all ranks, by ``<rank>/<role>``; a weight is the same on all ranks. Without
    ``zeros`` none vanishes."""
    g = torch.Generator().manual_seed(21)
    for step in range(STEPS):
        given = {}
        for role, shape in SHAPES.items():
            size = SIZES[role][step] or (0.0 if zeros else 0.5)
            shared = torch.randn(shape, generator=g)
            for rank in range(RANKS):
                x = shared if role == "weight" else torch.randn(shape, generator=g) * (rank + 1)
                given[f"{rank}/{role}"] = x = (x * (1.0 if size == INFINITE else size)).bfloat16()
                if size == INFINITE and rank == 0:
                    x[0, 3] = INFINITE
        yield step, given
