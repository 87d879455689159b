"""From a trainer's weights to a rollout's, on one GPU: how fast an 8B model is quantized and pushed, device to device.

    python3 scripts/gpu/refit.py [--cpu]

The tensors are those of Llama-3.1-8B, by name and shape, in BF16; what is quantized goes into codes and scales that are
there, as an engine holds them, and what is not (norms, embedding, head) is copied. Ways:

    copy              every tensor as it is: the yardstick, and what a BF16 refit moves
    straight          each weight quantized from the trainer's memory into the engine's
    new, then copy    quantized to a new tensor, and copied: what a loader does that takes whole tensors
    through buffers   cut into pieces in two buffers of 256 MiB, as nemo_fp8.rollout.refit cuts them, and quantized from
                      there
    two processes     the same with the engine's side in a process of its own, which opens the buffers through CUDA IPC
    NeMo RL eager     NeMo RL's algorithm in torch, to new tensors, and copied

GB/s counts the BF16 bytes of the model over the time; nothing else is in the time but the push itself. As a replayed
CUDA graph a way is free of the time that Python takes to launch a few hundred kernels.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "scripts", ROOT / "scripts" / "gpu"):
    sys.path.insert(0, str(folder))

from bench_peers import padded_eager  # noqa: E402
from common import Run, Skipped, number, require_te, result_of, table  # noqa: E402

from nemo_fp8.contract import Operand  # noqa: E402
from nemo_fp8.numerics.quantize import quantize, quantize_into  # noqa: E402

WEIGHT = Operand("e4m3", (128, 128), "fp32")
BLOCK = 128
# hidden, ffn, layers, width of k and v, vocabulary
LLAMA_8B = (4096, 14336, 32, 1024, 128256)
TINY = (256, 512, 2, 128, 512)
Tensors = dict[str, torch.Tensor]
Engine = dict[str, tuple[torch.Tensor, torch.Tensor | None]]


def shapes(hidden: int, ffn: int, layers: int, narrow: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its Hugging Face name."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}"
        found |= {
            f"{at}.self_attn.q_proj.weight": (hidden, hidden),
            f"{at}.self_attn.k_proj.weight": (narrow, hidden),
            f"{at}.self_attn.v_proj.weight": (narrow, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.mlp.gate_proj.weight": (ffn, hidden),
            f"{at}.mlp.up_proj.weight": (ffn, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, ffn),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def is_fp8(name: str) -> bool:
    return name.endswith("_proj.weight")


def engine_of(model: Tensors) -> Engine:
    """The memory of an engine: codes and scales where it multiplies in FP8, else a tensor of the same type."""
    held: Engine = {}
    for name, t in model.items():
        if is_fp8(name):
            scales = torch.empty(-(-t.shape[0] // BLOCK), -(-t.shape[1] // BLOCK), device=t.device)
            held[name] = torch.empty_like(t, dtype=torch.float8_e4m3fn), scales
        else:
            held[name] = torch.empty_like(t), None
    return held


# ---------------------------------------------------------------------- ways


def straight(model: Tensors, engine: Engine) -> None:
    for name, t in model.items():
        codes, scales = engine[name]
        if scales is None:
            codes.copy_(t)
        else:
            quantize_into(t, WEIGHT, codes, scales)


def then_copied(make: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Callable[[Tensors, Engine], None]:
    def push(model: Tensors, engine: Engine) -> None:
        for name, t in model.items():
            codes, scales = engine[name]
            if scales is None:
                codes.copy_(t)
            else:
                new, new_scales = make(t)
                codes.view(torch.uint8).copy_(new.view(torch.uint8))
                scales.copy_(new_scales)

    return push


def pieces(model: Tensors, buffers: list[torch.Tensor]) -> Iterator[tuple[int, list[tuple[str, int, int, int]]]]:
    """Fill the buffers in turn, matrices cut between rows of blocks: which buffer, and (name, first row, rows, offset)
    of its pieces."""
    which, used, held = 0, 0, []
    for name, t in model.items():
        row, width = 0, t[0].numel() * t.itemsize
        while row < len(t):
            fits = (buffers[which].numel() - used) // width
            rows = len(t) - row if fits >= len(t) - row else fits // BLOCK * BLOCK
            if rows == 0:
                yield which, held
                which, used, held = 1 - which, 0, []
                continue
            size = rows * width
            buffers[which][used : used + size].copy_(t[row : row + rows].reshape(-1).view(torch.uint8))
            held.append((name, row, rows, used))
            row, used = row + rows, used + -(-size // 64) * 64
    if held:
        yield which, held


def take(buffer: torch.Tensor, held: list[tuple[str, int, int, int]], engine: Engine) -> None:
    """The engine's side: every piece quantized from the buffer into its rows."""
    for name, row, rows, offset in held:
        codes, scales = engine[name]
        shape = (rows, *codes.shape[1:])
        size = codes[0].numel() * rows * 2
        t = buffer[offset : offset + size].view(torch.bfloat16).view(shape)
        if scales is None:
            codes[row : row + rows].copy_(t)
        else:
            quantize_into(t, WEIGHT, codes[row : row + rows], scales[row // BLOCK : -(-(row + rows) // BLOCK)])


def through_buffers(buffers: list[torch.Tensor]) -> Callable[[Tensors, Engine], None]:
    def push(model: Tensors, engine: Engine) -> None:
        for which, held in pieces(model, buffers):
            take(buffers[which], held, engine)

    return push


# ---------------------------------------------------------------------- measuring


def pushes(run: Run, model: Tensors) -> dict[str, Any]:
    """Every way in one process, in turns; the codes of all are the same."""
    engine = engine_of(model)
    room = 1 << (18 if run.cpu else 28)
    buffers = [torch.empty(room, dtype=torch.uint8, device=run.device) for _ in range(2)]
    ways: dict[str, Callable[[Tensors, Engine], None]] = {
        "straight": straight,
        "new, then copy": then_copied(lambda t: ((q := quantize(t, WEIGHT)).data, q.scale_inv)),
        "through buffers": through_buffers(buffers),
        "NeMo RL eager": then_copied(padded_eager),
    }
    try:
        te = require_te()
        quantizer = te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3, rowwise=True, columnwise=False, force_pow_2_scales=False
        )
        ways["TransformerEngine"] = then_copied(
            lambda t: ((q := quantizer(t))._rowwise_data, q._rowwise_scale_inv[:, : -(-t.shape[1] // BLOCK)])
        )
    except Skipped as reason:
        run.say(f"no TE among the ways: {reason}")
    target = {name: torch.empty_like(t) for name, t in model.items()}
    timed = {"copy": lambda: [target[name].copy_(t) for name, t in model.items()]}
    timed |= {name: (lambda push=push: push(model, engine)) for name, push in ways.items()}
    times = run.race(timed, 20.0, graphs=True)
    prints = {}
    for name, push in ways.items():
        if "error" not in times[name]:
            push(model, engine)
            prints[name] = _print(engine)
    return {"bytes": _bytes(model), "ways": times, "fingerprints": prints, "same": len(set(prints.values())) == 1}


def two_processes(run: Run, model: Tensors) -> dict[str, Any]:
    """The trainer's side here, the engine's in another process on the same GPU; buffers are opened once through CUDA
    IPC."""
    if run.cpu:
        room = 1 << 18
        buffers = [torch.empty(room, dtype=torch.uint8).share_memory_() for _ in range(2)]
    else:
        room = 1 << 28
        buffers = [torch.empty(room, dtype=torch.uint8, device="cuda") for _ in range(2)]
    context = torch.multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    lay = {name: tuple(t.shape) for name, t in model.items()}
    worker = context.Process(target=_engine_process, args=(theirs, run.device, buffers, lay), daemon=True)
    worker.start()
    times = []
    try:
        _hear(mine, "ready")
        for _ in range(2 if run.cpu else 4):
            run.wait()
            started = time.monotonic()
            waiting: list[bool] = [False, False]
            for which, held in pieces(model, _Turns(buffers, waiting, mine)):
                run.wait()  # the bytes are there before the other process is told
                mine.send((which, held))
                waiting[which] = True
            while any(waiting):
                waiting[_hear(mine)] = False
            times.append((time.monotonic() - started) * 1e3)
        mine.send(None)
        digest = _hear(mine)
    finally:
        worker.join(20)
        if worker.is_alive():
            worker.terminate()
    return {"bytes": _bytes(model), "ms": min(times), "all_ms": times, "fingerprint": digest, "buffer_bytes": room}


class _Turns(list):  # type: ignore[type-arg]
    """The buffers, each given out again only when the other side is done with it."""

    def __init__(self, buffers: list[torch.Tensor], waiting: list[bool], pipe: Any) -> None:
        super().__init__(buffers)
        self.waiting, self.pipe = waiting, pipe

    def __getitem__(self, which: Any) -> Any:
        while self.waiting[which]:
            self.waiting[_hear(self.pipe)] = False
        return super().__getitem__(which)


def _hear(pipe: Any, what: Any = None, seconds: float = 120.0) -> Any:
    if not pipe.poll(seconds):
        raise TimeoutError(f"the other process said nothing for {seconds:g} s")
    said = pipe.recv()
    if isinstance(said, str) and said.startswith("error"):
        raise RuntimeError(said)
    if what is not None and said != what:
        raise RuntimeError(f"expected {what!r}, heard {said!r}")
    return said


def _engine_process(pipe: Any, device: str, buffers: list[torch.Tensor], lay: dict[str, tuple[int, ...]]) -> None:
    try:
        model = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in lay.items()}
        engine = {
            name: (
                torch.empty_like(codes, device=device),
                None if scales is None else torch.empty_like(scales, device=device),
            )
            for name, (codes, scales) in engine_of(model).items()
        }
        pipe.send("ready")
        while (said := pipe.recv()) is not None:
            which, held = said
            take(buffers[which], held, engine)
            if device == "cuda":
                torch.cuda.synchronize()
            pipe.send(which)
        pipe.send(_print(engine))
    except Exception as error:
        pipe.send(f"error {type(error).__name__}: {error}")


def _print(engine: Engine) -> str:
    """A short fingerprint of everything that an engine holds."""
    total = 0
    for codes, scales in engine.values():
        for t in (codes, scales):
            if t is not None:
                total = (total * 1000003 + int(t.contiguous().view(torch.uint8).sum(dtype=torch.int64))) % (1 << 61)
    return f"{total:x}"


def _bytes(model: Tensors) -> int:
    return sum(t.numel() * t.itemsize for t in model.values())


# ---------------------------------------------------------------------- telling


def tell(record: dict[str, Any]) -> str:
    """The table of a record."""
    found, apart = result_of(record, "pushes"), result_of(record, "two processes")
    if not found:
        return "Nothing was measured."
    copy = found["ways"].get("copy", {}).get("ms")
    ways = dict(found["ways"])
    if apart:
        ways["two processes"] = {"ms": apart["ms"]}
    rows = []
    for name, way in ways.items():
        ms = way.get("ms")
        speed, share = ms and number(found["bytes"] / ms / 1e6), ms and copy and f"{copy / ms:.0%}"
        rows.append([name, way.get("error") or number(ms), speed, share, number(way.get("graph_ms"))])
    prints = found["fingerprints"] | ({"two processes": apart["fingerprint"]} if apart else {})
    odd = [name for name, text in prints.items() if text != prints.get("straight")]
    say = (
        f"all write the same codes and scales as `straight`, except {', '.join(odd)}"
        if odd
        else "all write the same codes and scales"
    )
    head = (
        f"{found['bytes'] / 2**30:.1f} GiB of BF16 weights, pushed into FP8 blocks of 128x128 with FP32 scales; {say}."
    )
    return "\n".join([head, "", table(["way", "ms", "GB/s of BF16", "of the copy", "as a graph, ms"], rows)])


def weights(run: Run) -> Tensors:
    """The trainer's side."""
    sizes = TINY if run.cpu else LLAMA_8B
    return {
        name: torch.randn(shape, dtype=torch.bfloat16, device=run.device).mul_(0.02)
        for name, shape in shapes(*sizes).items()
    }


def main() -> None:
    run = Run("refit", __doc__)
    model = functools.cache(
        lambda: weights(run)
    )  # of the first part that needs it: in a process that begins in the middle, too
    run.part("pushes", lambda: pushes(run, model()), seconds=80)
    run.part("two processes", lambda: two_processes(run, model()), seconds=60)
    run.finish(tell)


if __name__ == "__main__":
    main()
