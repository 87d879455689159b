"""Estimate the memory of a training run per GPU, item by item: what FP8 costs, and what FP8 primary weights save.

For a weight of an FP8 layer, in bytes an element on the rank that holds it:

                             BF16 training    FP8, cast from BF16    FP8 primary weight
    parameter                2                2                      -
    FP8 cast, by rows        -                1 + scales             1 + scales
    FP8 cast, by columns     -                1 + scales             1 + scales     (see below)
    gradient buffer          4 (or 2)         4 (or 2)               4 (or 2)
    FP32 master, two moments 12 / DP          12 / DP                12 / DP

So FP8 *adds* two bytes, and FP8 primary weights save two: the sum does not fall below that of BF16 (TE#1261). What
falls by half is the gather of the distributed optimizer. dgrad reads the cast by columns: FP8 GEMMs of sm89 and sm90
take one layout only (TN), so per-tensor recipes keep a transpose there, and none from sm100 on; blockwise and MXFP8
scale along each direction, so they keep both everywhere.

The estimate covers what stays from step to step. Activations, the communication buffers of NCCL, TE's workspaces and
fragments of the allocator come on top. Parameter counts are exact; tests compare them, the gradient buffer and the
optimizer's shards with megatron-core.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.models.layout import Parallel
from nemo_fp8.models.shapes import COLUMN, Linear, Model
from nemo_fp8.models.stored import contract_of_linear, stored, train_cut
from nemo_fp8.preflight.machine import Machine
from nemo_fp8.preflight.support import PER_TENSOR

COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Item:
    """One line of the estimate."""

    name: str
    bytes: int
    why: str


@dataclass(frozen=True)
class Estimate:
    """The bytes on the fullest GPU, and sentences that say what was assumed."""

    precision: str
    items: tuple[Item, ...]
    parameters: int
    """Parameters on that GPU."""
    stage: int
    """Its pipeline stage."""
    gather: int
    """Bytes that the distributed optimizer gathers on each GPU each step."""
    capacity: int | None
    """The memory of the GPU in bytes, if the machine is known."""
    assumptions: tuple[str, ...]

    @property
    def total(self) -> int:
        """All items together, in bytes."""
        return sum(item.bytes for item in self.items)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self) | {"total": self.total}


@dataclass(frozen=True)
class _Copy:
    """The bytes of a quantized copy of weights, and whether a GPU that reads either layout needs it, too."""

    kind: str
    """``FP8`` or ``NVFP4``: rules by module and a backward of its own put both into one model."""
    codes: int
    scales: int
    scaled: str
    """The bytes of a scale and the number of its values, in words."""
    needed: bool


@dataclass(frozen=True)
class _Share:
    """Parameters of one kind on one GPU: their number, their quantized copies, and the ranks that share their optimizer
    state."""

    elements: int
    over: int
    primary: bool = False
    rows: _Copy | None = None
    columns: _Copy | None = None
    modules: int = 0


def memory(
    model: Model, precision: Precision, parallel: Parallel | None = None, machine: Machine | None = None
) -> Estimate:
    """Estimate the pipeline stage that needs the most memory."""
    parallel = parallel or Parallel()
    stages = (_stage(stage, model, precision, parallel, machine) for stage in range(parallel.pipeline))
    return max(stages, key=lambda estimate: estimate.total)


def alternatives(
    model: Model, precision: Precision, parallel: Parallel | None = None, machine: Machine | None = None
) -> list[Estimate]:
    """Estimate BF16 training, the contract without and the contract with FP8 primary weights, for comparison."""
    found = [Precision(name=precision.compute, compute=precision.compute, grad_reduce=precision.grad_reduce)]
    if precision.is_quantized:
        names = {False: f"{precision.name}, fp8_param=False", True: f"{precision.name}, fp8_param=True"}
        found += [
            precision.replace(fp8_param=on, name=names[on])
            for on in (False, True)
            if not (on and (precision.compute == "fp32" or precision.scaling == "nvfp4"))
        ]
    return [memory(model, p, parallel, machine) for p in found]


def savings(
    model: Model, precision: Precision, parallel: Parallel | None = None, machine: Machine | None = None
) -> str:
    """Say in words what FP8 primary weights save; empty without FP8."""
    estimates = alternatives(model, precision, parallel, machine)
    if len(estimates) < 3:
        return ""
    plain, cast, primary = estimates
    less, against = cast.total - primary.total, primary.total - plain.total
    saves = (
        f"fp8_param=True saves {_gib(less)} a GPU over fp8_param=False"
        if less > 0
        else "fp8_param=True saves no memory"
    )
    near = abs(against) < plain.total // 500
    beside = "about as much as" if near else f"{_gib(abs(against))} {'more' if against > 0 else 'less'} than"
    wire = (
        f"It gathers {_gib(primary.gather)} a step in place of {_gib(cast.gather)}."
        if primary.gather != cast.gather
        else "The gather is as large."
    )
    return f"{saves}; it takes {beside} {plain.precision.upper()} training. {wire}"


# ---------------------------------------------------------------------- one stage


def _stage(stage: int, model: Model, p: Precision, parallel: Parallel, machine: Machine | None) -> Estimate:
    shares = [*_shares(stage, model, p, parallel)]
    compute = COMPUTE_BYTES[p.compute]
    reduce_bytes = 4 if p.grad_reduce == "fp32" else compute
    old = machine is None or machine.arch is None or machine.arch < 100
    elements = sum(share.elements for share in shares)
    primary = sum(share.elements for share in shares if share.primary)
    rows = [share.rows for share in shares if share.rows]
    columns = [share.columns for share in shares if share.columns and (old or share.columns.needed)]
    spread = parallel.distributed_optimizer is not False
    optimizer = sum(-(-share.elements // (share.over if spread else 1)) for share in shares)
    through_own_buffer = p.scaling == "mxfp8" and parallel.reuse_grad_buf is False and spread
    items = [
        Item("parameters", (elements - primary) * compute, f"{p.compute.upper()}; the optimizer gathers them in place"),
        *_codes("weights by rows", rows, "what fprop reads"),
        *_codes("weights by columns", columns, "what dgrad reads"),
        *_scales([*rows, *columns]),
        Item("gather buffer", primary * compute if through_own_buffer else 0, _gather_why(p, through_own_buffer)),
        Item("gradients", elements * reduce_bytes, "FP32" if reduce_bytes == 4 else p.compute.upper()),
        Item("master parameters", 0 if p.compute == "fp32" else optimizer * 4, "FP32" + _spread_why(parallel, spread)),
        Item("optimizer state", optimizer * 8, "Adam's two moments in FP32" + _spread_why(parallel, spread)),
    ]
    if p.scaling == "delayed":
        history = 5 * 4 * p.amax_history_len * sum(share.modules for share in shares)
        items.append(Item("amax histories", history, f"{p.amax_history_len} steps for 5 tensors of each linear layer"))
    gathered = elements * compute - primary * (0 if p.scaling == "mxfp8" else compute - 1)
    return Estimate(
        precision=p.name,
        items=tuple(item for item in items if item.bytes or item.name == "gather buffer"),
        parameters=elements,
        stage=stage,
        gather=gathered if spread else 0,
        capacity=machine.memory if machine else None,
        assumptions=tuple(_assumptions(p, parallel, machine)),
    )


def _codes(name: str, copies: list[_Copy], why: str) -> Iterator[Item]:
    """Yield an item for each kind of codes among these copies."""
    for kind, alike in _by_kind(copies).items():
        yield Item(f"{kind} {name}", sum(copy.codes for copy in alike), why)


def _scales(copies: list[_Copy]) -> Iterator[Item]:
    """Yield an item for the scales of each kind of codes."""
    for kind, alike in _by_kind(copies).items():
        why = "; ".join(dict.fromkeys(copy.scaled for copy in alike))
        yield Item(f"{kind} scales", sum(copy.scales for copy in alike), why)


def _by_kind(copies: list[_Copy]) -> dict[str, list[_Copy]]:
    found: dict[str, list[_Copy]] = {}
    for copy in copies:
        found.setdefault(copy.kind, []).append(copy)
    return found


def _shares(stage: int, model: Model, p: Precision, parallel: Parallel) -> Iterator[_Share]:
    dense = parallel.data * parallel.context
    of_experts = max(1, parallel.tensor * dense // (parallel.expert * parallel.experts_cut))
    per_stage = -(-model.layers // parallel.pipeline)
    layers = range(stage * per_stage, min(model.layers, (stage + 1) * per_stage))
    fates = stored(model, p, parallel, "train")
    for layer in layers:
        for linear in model.linears(layer):
            fate = fates[layer, linear.name]
            own = contract_of_linear(model, p, layer, linear, "train") if isinstance(fate, Operand) else None
            yield from _linear(linear, own, p, parallel, of_experts if linear.experts else dense)
    cut = 128 * parallel.tensor
    embedding = -(-model.vocab // cut) * cut * model.hidden // parallel.tensor
    first, last = stage == 0, stage == parallel.pipeline - 1
    copies = int(first) + int(last) - int(first and last and model.tied)
    yield _Share(copies * embedding, dense)
    yield _Share(sum(map(model.unsplit, layers)) + first * model.positions + last * model.final_norm, dense)


def _linear(linear: Linear, own: Precision | None, p: Precision, parallel: Parallel, over: int) -> Iterator[_Share]:
    """Yield the shares of a linear and of its bias; ``own`` is its contract, None in the compute dtype."""
    cut = train_cut(linear, parallel)
    parts, columns = linear.on_rank(cut)
    rows, count = sum(parts), max(1, linear.experts // parallel.expert)
    forward = own.operand("weight") if own else None
    # A backward in the compute dtype reads the forward's codes, or the weight itself.
    backward = own.in_backward.operand("weight") if own and own.backward == "quantized" else None
    yield _Share(
        rows * columns * count,
        over,
        primary=own is p and p.fp8_param,  # a module with a recipe of its own keeps its weight in the compute dtype
        rows=_copy(forward, rows, columns, count, needed=True) if forward else None,
        columns=_copy(backward, rows, columns, count, needed=backward.block is not None) if backward else None,
        modules=count if forward else 0,
    )
    yield _Share((linear.bias // cut if linear.split == COLUMN else linear.bias) * count, over)


def _copy(operand: Operand, rows: int, columns: int, count: int, *, needed: bool) -> _Copy:
    """Return the bytes of one quantized copy of ``count`` weights; not ``needed`` where a GEMM reads either layout."""
    if operand.format == "e2m1":
        # TransformerEngine repeats the scale of a square for each of its rows.
        kind, codes, scales, scaled = "NVFP4", rows * columns // 2, rows * columns // 16 + 4, "1 byte for 16 values"
    else:
        kind, codes = "FP8", rows * columns
        high, wide = operand.block or (rows, columns)
        if operand.scale == "e8m0":
            scales, scaled = rows * columns // 32, "1 byte for 32 values"
        else:
            scales = 4 * -(-rows // high) * -(-columns // wide)
            scaled = f"4 bytes for {high}x{wide} values" if operand.block else "4 bytes for each weight"
    return _Copy(kind, codes * count, scales * count, scaled, needed)


# ---------------------------------------------------------------------- in words


def _gather_why(p: Precision, own: bool) -> str:
    if own:
        return f"mxfp8 gathers {p.compute.upper()} and casts after; without reuse_grad_buf into a buffer of its own"
    return (
        "mxfp8 gathers through the gradient buffer"
        if p.scaling == "mxfp8" and p.fp8_param
        else "none: parameters lie in the buffer that is gathered"
    )


def _spread_why(parallel: Parallel, spread: bool) -> str:
    ranks = parallel.data * parallel.context
    return f", spread over {ranks} ranks" if spread and ranks > 1 else ""


def _assumptions(p: Precision, parallel: Parallel, machine: Machine | None) -> Iterator[str]:
    yield "Activations, NCCL's buffers, TransformerEngine's workspaces and fragments of the allocator come on top."
    yield "Adam with FP32 moments; parameters and gradients in Megatron's buffers; the vocabulary padded to 128 x tp."
    if parallel.distributed_optimizer is None:
        yield "The distributed optimizer is on."
    if p.is_quantized:
        yield "Quantized copies of weights are kept over the microbatches of a step, as Megatron does."
        if any(own.scaling in PER_TENSOR for own in p.variants()) and (machine is None or machine.arch is None):
            yield "The GPU is an sm89 or sm90, which needs weights by columns too; sm100 does not."
        if machine is not None and machine.has_gpu is False:
            yield "The figures are TransformerEngine's on a GPU, not the emulation's on this machine."
        if p.scaling == "mxfp8" and p.fp8_param and parallel.reuse_grad_buf is None:
            yield "reuse_grad_buf_for_mxfp8_param_ag is on."


def _gib(n: int) -> str:
    return f"{n / 2**30:.2f} GiB"
