"""Capture the inputs and output gradients of a model's linears, to measure later what a precision does to them.

    with nemo_fp8.capture(model, "activations.safetensors"):
        model(x).sum().backward()

The file holds ``<linear>.input`` of every linear, and ``<linear>.grad`` (of its output) if backward ran, in their own
dtypes: the two operands that a recipe quantizes beside the weight. Each is a sample: the first rows of many calls, up
to ``rows``, so that a long run writes a small file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.selection import require_module


@contextmanager
def capture(
    model: torch.nn.Module, path: str | Path | None = None, *, rows: int = 4096, only: str = "*"
) -> Iterator[dict[str, torch.Tensor]]:
    """Record inputs and output gradients of the linears whose names match ``only``, and save them to ``path``.

    ``rows`` is the most that is kept of a tensor. Yields the dictionary that is being filled; it is complete when the
    block ends. If the block raises, nothing is saved. Raises PrecisionError if no linear matches, none ran, or, before
    the block, if ``model`` is none or there cannot be a file at ``path``.
    """
    require_module(model)
    if path is not None and (not isinstance(path, str | Path) or Path(path).is_dir() or not Path(path).parent.is_dir()):
        raise PrecisionError(
            f"Nothing can be saved at {path!r}.",
            "It is a folder, or lies in none, and what was captured would be lost at the end.",
            "Give the path of a file in a folder that exists.",
        )
    linears = {name: m for name, m in model.named_modules() if _is_linear(m) and fnmatchcase(name, only)}
    if not linears:
        raise PrecisionError(
            f"Nothing to capture: no linear is called {only!r}.",
            "Modules with a weight matrix whose class is a Linear (nn.Linear, Megatron's, TE's) are looked for.",
            "Check only= against the names in model.named_modules().",
        )
    samples: dict[str, list[torch.Tensor]] = defaultdict(list)
    captured: dict[str, torch.Tensor] = {}
    handles = [handle for name, module in linears.items() for handle in _watch(module, name, samples, rows)]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
    captured.update({name: torch.cat(parts) for name, parts in samples.items()})
    if not captured:
        raise PrecisionError(
            "Nothing was captured.",
            "No linear ran inside the block.",
            "Run the model's forward (and backward) inside of it.",
        )
    if path is not None:
        save(captured, path)


def save(captured: dict[str, torch.Tensor], path: str | Path) -> None:
    """Write captured tensors as safetensors; the metadata says what they are."""
    from safetensors.torch import save_file

    save_file(
        {name: t.contiguous() for name, t in captured.items()}, str(path), metadata={"nemo_fp8": "captured activations"}
    )


def _is_linear(module: torch.nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    named_so = isinstance(module, torch.nn.Linear) or "Linear" in type(module).__name__
    return named_so and isinstance(weight, torch.Tensor) and weight.dim() == 2


def _watch(module: torch.nn.Module, name: str, samples: dict[str, list[torch.Tensor]], rows: int) -> Iterator[Any]:
    """Watch the input and the output gradient of a linear. Megatron's linears return (output, bias)."""

    def keep(key: str, x: torch.Tensor) -> None:
        taken = sum(len(part) for part in samples[key])
        if taken < rows:
            samples[key].append(x.detach().reshape(-1, x.shape[-1])[: rows - taken].to("cpu", copy=True))

    def after(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        if tensors:
            keep(f"{name}.input".lstrip("."), tensors[0])
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor) and first.requires_grad:
            first.register_hook(lambda grad: keep(f"{name}.grad".lstrip("."), grad))  # type: ignore[no-untyped-call]

    yield module.register_forward_hook(after, with_kwargs=True)
