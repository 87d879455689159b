"""Golden vectors recorded: every case of a file, asked of somebody else's quantizer.

``quantize_by(x, operand, usage)`` answers with codes and scale_inv in our layout. It may move data, and never compute.
Who answers lies elsewhere: TransformerEngine's kernels in ``benchmarks/gpu/conformance.py``, its own Python in
``te_python.py``.
"""

from __future__ import annotations

import datetime
import itertools
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing
from golden import RANKS, STEPS, Golden, delayed_inputs, inputs, operand_of

# file -> (block, kind of scale) of the operands in it
RECIPES: dict[str, list[tuple[tuple[int, int] | None, str]]] = {
    "tensorwise": [(None, "fp32"), (None, "pow2")],
    "blockwise_fp32": [((1, 128), "fp32"), ((128, 128), "fp32")],
    "blockwise_pow2": [((1, 128), "pow2"), ((128, 128), "pow2")],
    "mxfp8": [((1, 32), "e8m0")],
}
DELAYED = [
    {"format": "hybrid", "history_len": 4, "algo": "max", "margin": 0},
    {"format": "hybrid", "history_len": 4, "algo": "most_recent", "margin": 1},
    {"format": "e4m3", "history_len": 1, "algo": "most_recent", "margin": 0},
]
Pair = tuple[torch.Tensor, torch.Tensor]
Rank = Callable[[int, Any, dict[str, Any]], dict[str, torch.Tensor]]


def new(source: str, versions: str, command: str) -> Golden:
    """A file without cases, that says where it comes from, and by which command."""
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return Golden({"source": source, "date": date, "command": command, "versions": versions})


def usages(block: tuple[int, int] | None) -> tuple[str, ...]:
    """A square tile has one."""
    return ("row",) if block is None or block[0] == block[1] else ("row", "col")


def record(
    golden: Golden,
    quantize_by: Callable[[torch.Tensor, Any, str], Pair],
    recipe: str,
    names: tuple[str, ...],
    device: str = "cpu",
) -> dict[str, str]:
    """Add the quantized tensors of a recipe; the cases that their source refused, each with its reason."""
    left_out, given = {}, {name: x for name, x in inputs().items() if name in names}
    for (block, scale), element, name in itertools.product(RECIPES[recipe], ("e4m3", "e5m2"), given):
        if element == "e5m2" and name not in (names[0], "specials.bf16"):
            continue
        for usage in usages(block):
            shown = "tensor" if block is None else "x".join(map(str, block))
            case = {
                "name": f"{shown}.{scale}.{element}.{usage}.{name}",
                "kind": "quantize",
                "input": name,
                "operand": {"format": element, "block": block, "scale": scale},
                "usage": usage,
            }
            try:
                codes, scale_inv = (t.cpu() for t in quantize_by(given[name].to(device), operand_of(case), usage))
            except (RuntimeError, ValueError, AssertionError) as refused:
                left_out[case["name"]] = " ".join(f"{type(refused).__name__}: {refused}".split())[:200]
                continue
            golden.cases.append(case)
            golden.tensors |= {
                f"{case['name']}/codes": codes,
                f"{case['name']}/scale_inv": scale_inv,
                f"inputs/{name}": given[name],
            }
    return left_out


def record_delayed(golden: Golden, one: Rank, zeros: bool) -> None:
    """Add the cases of delayed scaling, several steps on two ranks."""
    golden.tensors |= {
        f"inputs/delayed/{step}/{key}": x for step, given in delayed_inputs(zeros) for key, x in given.items()
    }
    about = {"kind": "delayed", "steps": STEPS, "ranks": RANKS}
    cases = [{"name": f"delayed.{number}"} | about | settings for number, settings in enumerate(DELAYED)]
    for case, *kept in zip(cases, *_on_ranks(one, cases), strict=True):
        for key in kept[0].keys() & kept[1].keys():  # the state after a step, which the ranks share
            same = torch.equal(kept[0][key].view(torch.int32), kept[1][key].view(torch.int32))
            assert same, f"the ranks disagree on {case['name']}/{key}: {kept[0][key]} and {kept[1][key]}"
        golden.tensors |= {f"{case['name']}/{key}": t for found in kept for key, t in found.items()}
    golden.cases += cases


def _on_ranks(one: Rank, cases: list[dict[str, Any]]) -> list[list[dict[str, torch.Tensor]]]:
    """What each rank finds in each case, [rank][case]; the ranks are fresh processes, and share the device if there is
    one."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (one, cases, folder), nprocs=RANKS)
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(RANKS)]


def _rank(rank: int, one: Rank, cases: list[dict[str, Any]], folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Two processes share one GPU, which NCCL refuses; gloo carries tensors of either device.
    store = torch.distributed.FileStore(f"{folder}/store", RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.save([one(rank, torch.distributed.group.WORLD, case) for case in cases], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()
