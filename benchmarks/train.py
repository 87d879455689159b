"""What FP8 costs on a CPU, and what it does to the loss: the tables of docs/benchmarks/training.md.

    python benchmarks/train.py speed [--model tiny|wide] [--steps 12] [--torchao DIR] [--json]
    python benchmarks/train.py memory [--model tiny|wide]
    python benchmarks/train.py processors --results FILE [--steps 6]
    python benchmarks/train.py loss --results FILE [--steps 300] [--seeds 1,2,3] [--four-bits]

``speed`` alternates BF16 and FP8 steps of one model in one process, so that whatever else the machine does falls on
both: a step in BF16, the same step under each recipe, and so on; the figure is the median of the ratios of neighbours.
FP8 primary weights are off, since the BF16 steps use the same weights. Time is that of one thread on the processor, so
that a busy machine counts less. ``--json`` prints ``{"isa": ..., "rows": [{"model", "recipe", "ms", "ratio"}]}``.
``memory`` prints what such steps hold, by ``torch.cuda``'s words for it, which count tensors: no other process changes
them. ``processors`` times steps with the instructions that oneDNN and torch may use capped, and adds BF16 steps with
torch's own BF16 products, as they were without ``nemo_fp8.numerics.bf16``. ``loss`` trains tiny_llama on two ranks
under every recipe and seed, and adds each run, with the loss of every step, to FILE as soon as it is done, so that it
may be ended and started again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

RECIPES = {
    "delayed": "bf16_with_fp8_mixed",
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "blockwise": "bf16_with_fp8_blockwise_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}
# What a step's time is measured under; NVFP4 is a field of Megatron's config beside FP8's.
TIMED = RECIPES | {"nvfp4": "bf16_with_nvfp4_mixed"}
CONTROLS = ("bf16_with_nvfp4_mixed", "control", "one_scale")  # NVFP4, and what is known to be worse
FOUR_BITS = ("bf16_mixed", "bf16_with_fp8_blockwise_mixed", "bf16_with_mxfp8_mixed", *CONTROLS)
# Known to be worse: what NVFP4's recipe is for, left out; and, far worse, no scales of blocks. An experiment that tells
# neither apart shows nothing.
CONTROL = {"weight_block": "1x16", "hadamard": False, "stochastic_rounding": False, "name": "control"}
ONE_SCALE = "nemo_fp8.experiments.one_scale.tiny_llama"
# hidden, ffn, layers, sequence, micro-batch
MODELS = {"tiny": (256, 768, 6, 128, 4), "wide": (2048, 5632, 4, 256, 2)}


def loss(results: Path, steps: int, seeds: list[int], four_bits: bool = False) -> None:
    from nemo_fp8 import preset
    from nemo_fp8.experiments.trial import Trial, run_trial

    # A run of an earlier version, of which only the end was kept, is no curve, and is taken again.
    done = [row for row in json.loads(results.read_text()) if "losses" in row] if results.exists() else []
    for seed in seeds:
        for name in FOUR_BITS if four_bits else ("bf16_mixed", *RECIPES.values()):
            if any((row["seed"], row["precision"], row["steps"]) == (seed, name, steps) for row in done):
                continue
            changes = {"control": CONTROL, "one_scale": {"name": "one_scale"}}.get(name)
            precision = preset(name) if changes is None else preset("bf16_with_nvfp4_mixed").replace(**changes)
            recipe = ONE_SCALE if name == "one_scale" else "tiny_llama"
            outcome = run_trial(Trial(recipe, precision, steps=steps, seed=seed))
            last = outcome.losses[-steps // 10 :]
            told = {
                "seed": seed,
                "precision": name,
                "steps": steps,
                "loss": mean(last),
                "seconds": round(sum(outcome.seconds), 1),
            }
            print(told, flush=True)
            done.append(told | {"losses": [round(value, 4) for value in outcome.losses]})
            results.write_text("[\n" + ",\n".join(json.dumps(row) for row in done) + "\n]\n")
    print(loss_table(done))
    if four_bits:
        print(loss_table([row for row in done if row["precision"] in CONTROLS], base=CONTROLS[0]))


def loss_table(rows: list[dict[str, Any]], base: str = "bf16_mixed") -> str:
    """Return the last losses and their gaps to those of ``base``, seed by seed; from five seeds on with a 95%
    interval."""
    from nemo_fp8.mismatch.band import student_t

    seeds = sorted({row["seed"] for row in rows})
    found = {(row["precision"], row["seed"]): row["loss"] for row in rows}
    lines = [
        "| precision | " + " | ".join(f"seed {s}" for s in seeds) + " | mean gap |",
        "|---" * (len(seeds) + 2) + "|",
    ]
    for name in dict.fromkeys(row["precision"] for row in rows):
        gaps = [100 * (found[name, s] / found[base, s] - 1) for s in seeds if (name, s) in found]
        cells = [f"{found[name, s]:.4f} ({g:+.2f}%)" for s, g in zip(seeds, gaps, strict=False)]
        cells += ["-"] * (len(seeds) - len(cells))
        half = student_t(0.975, len(gaps) - 1) * stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 4 else None
        within = "" if half is None else f" ± {half:.2f}"
        lines.append(f"| `{name}` | " + " | ".join(cells) + f" | {mean(gaps):+.2f}%{within} |")
    return "\n".join(lines)


# ---------------------------------------------------------------------- speed


OWN = "torch's own BF16 products"
# What oneDNN and torch are told that the processor has; both speak of the best that they may use.
PROCESSORS = {
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "AVX-512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "ATEN_CPU_CAPABILITY": "avx512"},
    "all that this one has": {},
}


def speed(model: str, steps: int, torchao: str | None, own: bool, results: Path | None, as_json: bool) -> None:
    """Print the time of a step in BF16 and under every recipe, and its ratio to BF16."""
    import torch

    hidden, ffn, layers, sequence, micro = MODELS[model]
    with redirect_stdout(sys.stderr):  # what NeMo prints is no figure
        seconds = alternate(model, steps, [None, *([OWN] if own else []), *TIMED])
    rows = []
    for kind, mine in seconds.items():
        ratio = median(a / b for a, b in zip(mine, seconds[None], strict=True))
        rows.append(
            {"model": model, "recipe": kind or "bf16", "ms": round(1000 * median(mine), 1), "ratio": round(ratio, 2)}
        )
    if results:
        results.write_text(json.dumps({row["recipe"]: {"ms": row["ms"], "ratio": row["ratio"]} for row in rows}))
    if as_json:
        # torch's instruction set; oneDNN, which multiplies BF16, has a variable of its own.
        isa = os.environ.get("ONEDNN_MAX_CPU_ISA", torch.backends.cpu.get_cpu_capability())
        print(json.dumps({"isa": isa, "rows": rows}))
        return
    print(f"{model}: hidden {hidden}, ffn {ffn}, {layers} layers, {sequence * micro} tokens a step, one thread")
    for row in rows:
        print(f"  {row['recipe']:<11} {row['ms']:8.1f} ms   {row['ratio']:.2f} x BF16")
    if torchao:
        linears(torchao, sequence * micro, hidden, ffn)


def processors(results: Path, steps: int) -> None:
    """Time tiny_llama with fewer and fewer instructions, each in a process of its own; write a JSON file and print a
    table."""
    found = {}
    for name, environment in PROCESSORS.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "speed.json")
            command = [
                sys.executable,
                __file__,
                "speed",
                "--model",
                "tiny",
                "--steps",
                str(steps),
                "--own",
                "--results",
                str(file),
            ]
            # torch's compiled kernels for one processor end a process on another, and its cache does not tell them
            # apart.
            alone = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": folder}
            subprocess.run(command, env=os.environ | environment | alone, check=True)
            found[name] = json.loads(file.read_text())
        results.write_text(json.dumps(found, indent=1))
    print(processors_table(found))


def processors_table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    names = list(dict.fromkeys(name for rows in found.values() for name in rows))
    lines = [
        "| instructions | " + " | ".join({"bf16": "BF16"}.get(n, n) for n in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for processor, rows in found.items():
        cells = [f"{rows[n]['ms']:.0f} ms" + ("" if n == "bf16" else f" ({rows[n]['ratio']:.2f})") for n in names]
        lines.append(f"| {processor} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def memory(model: str) -> None:
    """Print the most bytes that tensors hold in a step of every kind, and those that a step leaves for the next.

    Without delayed scaling, which keeps what tensorwise keeps and its amaxes besides: these stay when the next step is
    of another recipe.
    """
    held: dict[str | None, tuple[int, int]] = {}
    with redirect_stdout(sys.stderr):
        alternate(model, 1, [None, *(name for name in TIMED if name != "delayed")], held)
    print("| recipe | most in a step, MB | of BF16's | copies of weights, MB |")
    print("|---|---|---|---|")
    for kind, (most, left) in held.items():
        name, share = kind or "BF16", most / held[None][0]
        print(f"| {name} | {most / 1e6:,.1f} | {share:.2f} | {left / 1e6:,.1f} |")


def alternate(
    model: str, steps: int, kinds: list[str | None], held: dict[str | None, tuple[int, int]] | None = None
) -> dict[str | None, list[float]]:
    """Measure the seconds of each step of every kind, in turns in one Megatron model, all of its layers in FP8.

    ``held`` gets of the last step of every kind the most bytes that tensors held, and how many more it left than it
    found.
    """
    import fiddle as fdl

    from nemo_fp8.experiments import tiny_llama

    hidden, ffn, layers, sequence, micro = MODELS[model]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    recipe = tiny_llama("bf16_mixed", ranks=1, steps=(steps + 2) * len(kinds), dir="/tmp/bench_train")
    config = recipe.model.config
    config.hidden_size, config.ffn_hidden_size, config.num_layers, config.seq_length = hidden, ffn, layers, sequence
    config.num_attention_heads, config.num_query_groups = hidden // 64, hidden // 128
    recipe.data.seq_length, recipe.data.micro_batch_size, recipe.data.global_batch_size = sequence, micro, micro
    recipe.trainer.enable_checkpointing, recipe.log.ckpt, recipe.log.tensorboard, recipe.resume = (
        False,
        None,
        None,
        None,
    )
    train = fdl.build(recipe)
    trainer = train.keywords["trainer"]
    turns = _alternate(kinds, held)
    trainer.callbacks = [turns]
    train()
    return {kind: seconds[2:] for kind, seconds in turns.seconds.items()}


def _alternate(kinds: list[str | None], held: dict[str | None, tuple[int, int]] | None = None) -> Any:
    import torch
    from lightning.pytorch.callbacks import Callback

    from nemo_fp8 import preset
    from nemo_fp8.numerics import bf16

    class Alternate(Callback):
        """Before each step, write the next recipe into the model's config, where Megatron reads it in every forward."""

        def __init__(self) -> None:
            self.seconds: dict[str | None, list[float]] = {kind: [] for kind in kinds}

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.kind = kinds[trainer.global_step % len(kinds)]
            contract = preset(TIMED[self.kind]) if self.kind in TIMED else None
            four_bits = contract is not None and contract.format == "e2m1"
            self.closed = self.kind == OWN and not bf16.multiplies_bf16()
            if self.closed:
                bf16._replaced.leave()
            for module in trainer.model.modules():
                if (config := getattr(module, "config", None)) is not None and hasattr(config, "fp8_recipe"):
                    config.fp8 = None if contract is None or four_bits else contract.format
                    config.fp4 = contract.format if four_bits else None
                    if four_bits:
                        config.fp4_recipe = contract.scaling
                    elif contract is not None:
                        config.fp8_recipe, config.fp8_amax_history_len = contract.scaling, contract.amax_history_len
                if hasattr(module, "_fp8_workspaces"):
                    module._fp8_workspaces.clear()  # weights were quantized for another recipe
            if held is not None:
                torch.cuda.reset_peak_memory_stats()
                self.before = torch.cuda.memory_allocated()
            self.started = time.process_time()

        def on_train_batch_end(self, *_: Any) -> None:
            self.seconds[self.kind].append(time.process_time() - self.started)
            if held is not None:
                held[self.kind] = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated() - self.before
            if self.closed:
                bf16._replaced.enter()

    return Alternate()


def linears(folder: str, tokens: int, hidden: int, ffn: int) -> None:
    """Measure forward and backward of one BF16 linear, of ours, and of torchao's emulated float8, in turns."""
    sys.path.insert(0, folder)
    import torch
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from nemo_fp8 import preset
    from nemo_fp8.numerics.linear import linear

    def float8(model: Any) -> Any:
        return convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))

    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    plain = torch.nn.Linear(hidden, ffn, bias=False, dtype=torch.bfloat16)
    theirs = float8(torch.nn.Sequential(torch.nn.Linear(hidden, ffn, bias=False, dtype=torch.bfloat16)))
    tensorwise = preset(RECIPES["tensorwise"])
    calls = {
        "bf16": plain,
        "nemo_fp8 tensorwise": lambda x: linear(x, plain.weight, precision=tensorwise),
        "torchao emulated": theirs,
    }
    dy = torch.randn(tokens, ffn, dtype=torch.bfloat16)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(9):
        for name, call in calls.items():
            started = time.process_time()
            call(x).backward(dy)
            seconds[name].append(time.process_time() - started)
    print(f"one linear {hidden} -> {ffn}, {tokens} tokens, forward and backward")
    for name, times in seconds.items():
        ratio = median(a / b for a, b in zip(times[1:], seconds["bf16"][1:], strict=True))
        print(f"  {name:<20} {1000 * median(times[1:]):8.1f} ms   {ratio:.2f} x BF16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, dest="command")
    quick = commands.add_parser("speed")
    quick.add_argument("--model", choices=MODELS, default="tiny")
    quick.add_argument("--steps", type=int, default=12)
    quick.add_argument("--torchao", metavar="DIR", help="where torchao 0.18 lies")
    quick.add_argument("--own", action="store_true", help="BF16 steps with torch's own BF16 products, too")
    quick.add_argument("--json", action="store_true", dest="as_json", help="one JSON object in place of the table")
    quick.add_argument("--results", type=Path, help="a JSON file for the figures")
    held = commands.add_parser("memory")
    held.add_argument("--model", choices=MODELS, default="tiny")
    capped = commands.add_parser("processors")
    capped.add_argument("--results", type=Path, required=True)
    capped.add_argument("--steps", type=int, default=6)
    long = commands.add_parser("loss")
    long.add_argument("--results", type=Path, required=True)
    long.add_argument("--steps", type=int, default=300)
    long.add_argument("--four-bits", action="store_true", help="NVFP4 beside BF16, blockwise, MXFP8 and a control")
    long.add_argument("--seeds", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 3])
    arguments = vars(parser.parse_args())
    calls = {"speed": speed, "memory": memory, "processors": processors, "loss": loss}
    calls[arguments.pop("command")](**arguments)


if __name__ == "__main__":
    main()
