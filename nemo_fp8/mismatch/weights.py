"""Find the weights of an engine that are not the trainer's, and what happened to each.

Given are the trainer's weights and what the engine holds, both by Hugging Face name. The reference is what
:mod:`nemo_fp8.numerics` makes of the trainer's weights under the contract. If the engine holds something else, it is
compared with what it would hold after each of the known accidents:

    missing          the engine reports nothing about the tensor
    zeroed           codes of the reference with scales of zero; scales that are zero, infinite or NaN
    swapped          the reference of another tensor of the same shape, such as gate for up
    stale            the reference of the weights before the last push
    scales           the reference under the other scale convention (FP32 or powers of two): right to FP8's precision
    differs          none of these

Each is a row of :data:`nemo_fp8.findings.RULES`, ``weight-missing`` to ``weight-scales``.

What the engine holds may be given as codes and scales, as values if it is not in FP8, or as fingerprints, of the whole
tensor or of the parts that tensor-parallel workers hold, as in the receipt of a push. Sixteen digits for a tensor give
the same answer as its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Union

import torch

from nemo_fp8.contract import SCALES, Operand, Precision
from nemo_fp8.contract.naming import given
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.export.canonical import canonical
from nemo_fp8.findings import finding
from nemo_fp8.models.names import place
from nemo_fp8.models.selection import contract_of
from nemo_fp8.models.units import select, sharing_a_scale, units_of
from nemo_fp8.moved import renamed
from nemo_fp8.numerics import Quantized, quantize
from nemo_fp8.numerics.modelopt import amax_of
from nemo_fp8.numerics.nvfp4_tensor import QuantizedNVFP4
from nemo_fp8.rollout.refit.fingerprint import fingerprint

Weights = Mapping[str, torch.Tensor]
Parts = Mapping[str, str]
Held = Union[Quantized, "tuple[torch.Tensor, ...]", torch.Tensor, str, Parts]

if not TYPE_CHECKING:  # see nemo_fp8.moved
    __getattr__ = renamed(__name__, {"Difference": "nemo_fp8.errors.Problem"})


def reference(
    weights: Weights, precision: Precision | str, layers: int | None = None, *, side: str = "rollout"
) -> Iterator[tuple[str, Quantized]]:
    """Yield the name, codes and scales of every tensor that the contract stores in FP8, as workers must have them.

    ``layers`` is the number of decoder layers, found from the names if not given. ``side="train"`` yields the trainer's
    own FP8 weights; nothing, if the contract does not train in FP8. Raises PrecisionError if the contract is strict and
    shapes do not fit.
    """
    precision = given(precision)
    if precision.operand("weight", side) is None:
        return
    quantized = precision if precision.rolls_out_quantized else precision.replace(rollout="fp8")
    chosen = select(shapes_of(weights), quantized, layers=layers).quantized
    sharing, operands = _shared(weights), _operands(weights, precision, side)
    for name in weights:
        operand = operands[name] if name in chosen else None
        if operand is not None:
            others = sharing[name] if operand.format == "e2m1" and side == "rollout" else ()
            yield name, _cast(weights, name, replace(operand, delayed=False), others)


def _operands(weights: Weights, precision: Precision, side: str = "rollout") -> dict[str, Operand | None]:
    """Return how a side stores each weight: by the rule for its module, if there is one.

    In a rollout that is one rule for all that an engine holds as one, in training for what Megatron does.
    """
    found: dict[str, Operand | None] = {}
    for unit in units_of(shapes_of(weights)):
        if side == "rollout":
            found |= dict.fromkeys(unit.tensors, unit.contract(precision).operand("weight", side))
            continue
        of_megatrons: dict[str, Operand | None] = {}
        for tensor, module in zip(unit.tensors, unit.modules, strict=True):
            part = place(module).unit
            if part not in of_megatrons:
                own = contract_of(precision, (module,), unit.experts)
                of_megatrons[part] = own.operand("weight", side)
            found[tensor] = of_megatrons[part]
    return found


def _cast(weights: Weights, name: str, operand: Operand, sharing: Sequence[str] = ()) -> Quantized:
    """Quantize a weight, beneath the amax of all that share its scale if there are any, as an engine and an export do.

    A stack of experts is quantized matrix by matrix elsewhere; in NVFP4 their scales have no place here.
    """
    if not sharing:
        return quantize(weights[name], operand)
    return quantize(weights[name], operand, amax=torch.stack([amax_of(weights[other]) for other in sharing]).amax())


def _shared(weights: Weights) -> dict[str, tuple[str, ...]]:
    return {name: names for names in sharing_a_scale(shapes_of(weights)) for name in names}


def sides_apart(
    weights: Weights, precision: Precision | str, layers: int | None = None
) -> Iterator[tuple[str, float, float]]:
    """Yield for each tensor the shares of codes and of values in which the trainer's FP8 copy and the rollout's differ.

    If :func:`nemo_fp8.check` says that the values are equal but for underflow, the second share is that underflow.
    """
    both = (reference(weights, precision, layers, side=side) for side in ("train", "rollout"))
    for (name, ours), (_, theirs) in zip(*both, strict=False):  # a side without FP8 has no copy
        codes = ours.data.view(torch.uint8) != theirs.data.view(torch.uint8)
        values = ours.dequantize() != theirs.dequantize()
        yield name, float(codes.float().mean()), float(values.float().mean())


def shapes_of(weights: Weights) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor; from a checkpoint on disk without reading any."""
    known = getattr(weights, "shapes", None)
    return known() if callable(known) else {name: tuple(t.shape) for name, t in weights.items()}


def compare_weights(
    weights: Weights,
    held: Mapping[str, Held],
    precision: Precision | str,
    *,
    layers: int | None = None,
    previous: Weights | None = None,
) -> list[Problem]:
    """Return a problem for every tensor in which the engine differs from ``weights``; ``where`` is its name.

    ``held`` is what the engine holds. Tensors that are not in FP8 are compared only if they are in it. ``previous`` are
    the weights of the push before, which stale tensors are compared with. Raises PrecisionError for parts in ``held``
    that are none of a tensor, if something is in ``held`` and nothing can be compared, and as :func:`reference` does.
    """
    precision, found, quantized = given(precision), [], set()
    search = _Search(weights, precision, previous)
    for name, q in reference(weights, precision, layers):
        quantized.add(name)
        if name not in held:
            found.append(_different(name, "missing", "nothing is known of it"))
        elif not _same(held[name], q):
            found.append(search.explain(name, q, held[name]))
    for name in (n for n in weights if n in held and n not in quantized):
        if not _same(held[name], weights[name]):
            found.append(search.explain(name, weights[name], held[name]))
    if held and not found and not any(name in weights and _tells(told) for name, told in held.items()):
        raise PrecisionError(
            f"None of the {len(held)} tensors that the engine holds can be compared with a weight.",
            "They have other names than the weights, or no fingerprints that say something of a weight.",
            "Give what told_by(receipt) or read_back(engine) return, and the weights by their Hugging Face names.",
        )
    return found


def kind_of(different: Problem) -> str:
    """Return what happened to a weight, in one word: ``zeroed`` for the code ``weight-zeroed``."""
    return different.code.removeprefix("weight-")


def _different(name: str, kind: str, detail: str) -> Problem:
    return finding(f"weight-{kind}", name, name=name, detail=f"{detail[0].upper()}{detail[1:]}")


Candidate = tuple[str, str, Callable[[], "Quantized | torch.Tensor"]]


def told_by(receipt: Any) -> dict[str, Held]:
    """Return what the engine holds according to a push's receipt, or its ``to_dict()``.

    KV-cache scales are left out, since they are no weights. A tensor whose blocks straddle a cut has other codes than
    the reference; it has no fingerprints here, so it is not compared. Of a tensor that the engine's loader computes
    with, what came is compared.
    """
    if not isinstance(receipt, Mapping):
        receipt = receipt.to_dict()
    rows = [row for row in receipt["tensors"] if row["kind"] != "kv scale"]
    return {
        str(row["name"]): {str(k): str(v) for k, v in row["fingerprints"].items()} if row["aligned"] else {}
        for row in rows
    }


class _Search:
    """Finds the accident that explains what the engine holds of a tensor."""

    def __init__(self, weights: Weights, precision: Precision, previous: Weights | None) -> None:
        self.weights, self.previous = weights, previous or {}
        self.shapes, self.sharing = shapes_of(weights), _shared(weights)
        self.operands = _operands(weights, precision)

    def explain(self, name: str, expected: Quantized | torch.Tensor, held: Held) -> Problem:
        """Return the problem for a tensor that is not as expected, with the accident that explains it."""
        bad = _bad_scales(held)
        if bad:
            return _different(name, "zeroed", bad)
        for kind, detail, make in self._candidates(name, expected):
            if _same(held, make()):
                return _different(name, kind, detail)
        return _different(name, "differs", _how_much(expected, held))

    def _candidates(self, name: str, expected: Quantized | torch.Tensor) -> Iterator[Candidate]:
        if isinstance(expected, Quantized):
            q = expected
            yield "zeroed", "all scales are zero", lambda: replace(q, scale_inv=torch.zeros_like(q.scale_inv))
            yield "zeroed", "all weights are zero", lambda: self._zeroed(name)
            operand = self.operands[name]
            if operand is not None and operand.scale in _OTHER:
                other = replace(operand, scale=_OTHER[operand.scale])
                detail = f"{SCALES[other.scale]} scales, and the contract says {SCALES[operand.scale]}"
                yield "scales", detail, lambda: quantize(self.weights[name], other)
        else:
            yield "zeroed", "all values are zero", lambda: torch.zeros_like(expected)
        if name in self.previous:
            yield "stale", "the weights of the push before", lambda: self._like(expected, self.previous, name)
        for twin in self._twins(name):
            yield "swapped", f"it holds {twin}", lambda twin=twin: self._like(expected, self.weights, twin)  # type: ignore[misc]

    def _twins(self, name: str) -> list[str]:
        """Return the tensors that may have been swapped with this one: of its shape, in its layer or of its name."""
        mine = place(name)
        same = [other for other, shape in self.shapes.items() if other != name and shape == self.shapes[name]]
        near = [other for other in same if place(other).layer == mine.layer]
        return near + [other for other in same if other not in near and place(other).tail == mine.tail]

    def _like(self, expected: Quantized | torch.Tensor, weights: Weights, name: str) -> Quantized | torch.Tensor:
        if not isinstance(expected, Quantized):
            return weights[name]
        operand = self.operands[name]
        return weights[name] if operand is None else _cast(weights, name, operand, self._sharing(name))

    def _sharing(self, name: str) -> Sequence[str]:
        operand = self.operands[name]
        return self.sharing[name] if operand is not None and operand.format == "e2m1" else ()

    def _zeroed(self, name: str) -> Quantized:
        operand = self.operands[name]
        assert operand is not None
        zeros = {name: torch.zeros_like(self.weights[name])}
        return _cast(
            {other: self.weights[other] for other in self._sharing(name)} | zeros,
            name,
            operand,
            self._sharing(name),
        )


_OTHER = {"fp32": "pow2", "pow2": "fp32"}


# ---------------------------------------------------------------------- equal or not


def _same(held: Held, expected: Quantized | torch.Tensor) -> bool:
    """Return whether the engine holds the expected bytes; ``held`` is tensors or fingerprints.

    An engine that has loaded an export holds some blocks as that writes them: the same values, of other codes.
    """
    if _same_bytes(held, expected):
        return True
    return isinstance(expected, Quantized) and expected.block == (128, 128) and _same_bytes(held, _exported(expected))


def _exported(q: Quantized) -> Quantized:
    """Return the codes and scales that an export writes, matrix by matrix."""
    matrices, scales = q.data.view(-1, *q.shape[-2:]), q.scale_inv
    each = zip(matrices, scales.view(len(matrices), -1, scales.shape[-1]), strict=True)
    written = [canonical(replace(q, data=data, scale_inv=scale)) for data, scale in each]
    codes = torch.stack([one.data.view(torch.uint8) for one in written]).view(q.data.dtype)
    return replace(q, data=codes.view(q.shape), scale_inv=torch.cat([one.scale_inv for one in written]))


def _same_bytes(held: Held, expected: Quantized | torch.Tensor) -> bool:
    mine = _tensors(expected)
    if isinstance(held, str):
        return held == fingerprint(*mine)
    if isinstance(held, Mapping):
        return all(told == fingerprint(*_cut(expected, part)) for part, told in held.items() if " of " not in part)
    theirs = _tensors(held)
    return len(mine) == len(theirs) and all(_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _tells(held: Held) -> bool:
    """Return whether ``_same`` has something to compare."""
    return not isinstance(held, Mapping) or any(" of " not in part for part in held)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # A scalar cannot be viewed as bytes, a vector can.
    mine, theirs = (t.to(a.device).contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(mine, theirs)


def _tensors(held: Quantized | tuple[torch.Tensor, ...] | torch.Tensor) -> tuple[torch.Tensor, ...]:
    if isinstance(held, QuantizedNVFP4):
        return (held.data, held.scale_inv, held.weight_scale_2.view(1))
    if isinstance(held, Quantized):
        return (held.data, held.scale_inv)
    return (held,) if isinstance(held, torch.Tensor) else tuple(held)


def _cut(whole: Quantized | torch.Tensor, part: str) -> tuple[torch.Tensor, ...]:
    """Return the part of a tensor, and of its scales, that a worker holds.

    ``part`` is a name as receipts have it: ``0:128,0:256``, ``whole``, or the sizes, strides and offset of a view.
    """
    tensors = _tensors(whole)
    if part == "whole":
        return tensors
    if " by " in part:  # a view that is no box, such as a transpose
        sizes, strides, offset = (
            tuple(map(int, numbers.split("x"))) for numbers in part.replace(" by ", " from ").split(" from ")
        )
        return (tensors[0].contiguous().as_strided(sizes, strides, *offset),)
    try:
        box = [tuple(map(int, side.split(":"))) for side in part.split(",")]
        if isinstance(whole, QuantizedNVFP4):
            (start, stop), (left, right) = box
            codes, scales, beneath = tensors
            return codes[start:stop, left // 2 : right // 2], scales[start:stop, left // 16 : right // 16], beneath
        cut = tensors[0][tuple(slice(start, stop) for start, stop in box)]
    except ValueError:
        raise PrecisionError(
            f"{part!r} is no part of a tensor.",
            "Parts are written as start:stop for each dimension.",
            "Use a receipt's fingerprints.",
        ) from None
    if not isinstance(whole, Quantized):
        return (cut,)
    if whole.block is None:
        return cut, whole.scale_inv
    tile = (*(1 for _ in whole.shape[:-2]), *whole.block)  # blocks do not extend over two matrices of a stack
    scales = whole.scale_inv.reshape(*whole.shape[:-2], -1, whole.scale_inv.shape[-1])
    return cut, scales[tuple(slice(start // n, -(-stop // n)) for (start, stop), n in zip(box, tile, strict=True))]


# ---------------------------------------------------------------------- details of a problem


def _bad_scales(held: Held) -> str:
    if isinstance(held, (str, Mapping)):
        return ""
    tensors = _tensors(held)
    if len(tensors) < 2:
        return ""
    scales = tensors[1].float()
    bad = int((~(scales > 0) | scales.isinf()).sum())
    return f"{bad} of {scales.numel()} scales are zero, infinite or no number" if bad else ""


def _how_much(expected: Quantized | torch.Tensor, held: Held) -> str:
    if isinstance(held, (str, Mapping)):
        return "its fingerprint is another"
    theirs = _tensors(held)
    values = expected.dequantize() if isinstance(expected, Quantized) else expected.float()
    if theirs[0].shape != values.shape:
        return f"its shape is {tuple(theirs[0].shape)}, and not {tuple(values.shape)}"
    if isinstance(expected, Quantized) and len(theirs) == 2:
        if theirs[1].shape != expected.scale_inv.shape or theirs[0].dtype != expected.data.dtype:
            return f"its scales have the shape {tuple(theirs[1].shape)}, and not {tuple(expected.scale_inv.shape)}"
        other = replace(expected, data=theirs[0], scale_inv=theirs[1]).dequantize()
    else:
        other = theirs[0].float()
    distance = float((other - values).norm() / values.norm().clamp_min(1e-30))
    return f"its values are off by {distance:.2%} of their size"
