"""What tokens cost on a CPU: engines in BF16, packed or multiplied by rows, in FP8, whose products take the codes or
decode them on each call, and with NVFP4 weights, which vLLM's emulation decodes on each call. `spinning` is BF16 in
vLLM's own executor, and all others are in the one that sleeps, which `engine_args` names.

    .venv-rollout/bin/python benchmarks/decode.py                        all of these; --json prints one line
    .venv-rollout/bin/python benchmarks/decode.py --kernels codes        without the engines that decode
    .venv-rollout/bin/python benchmarks/decode.py --products             the products of one layer, without an engine
    .venv-rollout/bin/python benchmarks/decode.py --processor-time       where other programs keep the processors busy
    .venv-rollout/bin/python benchmarks/decode.py --as-avx2              as on a processor with AVX2 and nothing newer

Only ratios within one run mean anything. All engines hold the same model (203 M parameters) and take turns; the least
time of each counts. Each turn waits until the engine before it sleeps: vLLM's processes ask their queues without a
pause for a second after their last message, on one processor or two of those that the next engine computes on.
`--processor-time` starts all engines in one process with one thread, and tells its processor time. Decoding is timed by
generating two lengths after the same short prompt: the difference in time, over the difference in tokens, so that the
prompt is in neither. A prompt is timed by one token. Products are told in processor time of one thread, which a busy
machine changes less.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # whose engines and models it takes

SHAPE = {"hidden": 2048, "layers": 4, "intermediate": 6144, "heads": 16, "kv_heads": 8, "head_dim": 128}
BATCHES, PROMPT = (1, 8), (8, 256)
SHORT, LONG = 2, 14
# What is run -> the contract and options of its engine.
KERNELS: dict[str, dict[str, str]] = {
    "rows": {"rollout": "compute", "unquantized": "rows"},
    "auto": {"kernel": "auto"},
    "codes": {"kernel": "codes"},
    "decode": {"kernel": "decode"},
    "nvfp4": {"rollout": "nvfp4", "activation_scheme": "none"},
}


def seconds(llm: Any, prompts: list[dict[str, Any]], tokens: int, clock: Callable[[], float]) -> float:
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    asked = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0.0, detokenize=False)
    start = clock()
    llm.generate(prompts, asked, use_tqdm=False)
    return clock() - start


def rates(took: dict[tuple[int, int, int], float]) -> dict[str, float]:
    """Return the tokens in a second, from the least seconds of each job: (prompts, their length, tokens that are
    generated)."""
    found = {
        f"decode_{batch}": batch * (LONG - SHORT) / (took[batch, 8, LONG] - took[batch, 8, SHORT]) for batch in BATCHES
    }
    read = took.get((*PROMPT, 1))
    return found | ({} if read is None else {"prompt": PROMPT[0] * PROMPT[1] / read})


def products(turns: int) -> dict[str, float]:
    """Measure the milliseconds of the four products of one layer, for some numbers of tokens, and how BF16's
    compare."""
    import torch

    from nemo_fp8.contract import Operand
    from nemo_fp8.numerics import quantize
    from nemo_fp8.numerics.modelopt import amax_of, four_bits
    from nemo_fp8.rollout.engine import ops
    from nemo_fp8.rollout.engine.four_bits import decoded

    torch.set_num_threads(1)
    hidden, inner = SHAPE["hidden"], SHAPE["intermediate"]
    attention, draws = SHAPE["heads"] * SHAPE["head_dim"], torch.Generator().manual_seed(0)
    shapes = [(2 * attention, hidden), (hidden, attention), (2 * inner, hidden), (hidden, inner)]
    weights = [(torch.randn(shape, generator=draws) * shape[1] ** -0.5).bfloat16() for shape in shapes]
    codes = [quantize(weight, Operand("e4m3", (128, 128), "fp32")) for weight in weights]
    four = [four_bits(weight, Operand("e2m1", (1, 16), "e4m3"), amax_of(weight)) for weight in weights]
    best: dict[str, float] = {}
    for tokens in (1, 8, 64):
        x = {width: torch.randn(tokens, width, generator=draws).bfloat16() for width in (hidden, attention, inner)}

        def ours(direct: int, x: dict[int, torch.Tensor] = x) -> None:
            for q in codes:
                ops.decoded_linear(x[q.data.shape[1]], q.data, q.scale_inv, None, [128, 128], torch.bfloat16, direct)

        def bf16(_: int, x: dict[int, torch.Tensor] = x) -> None:
            for weight in weights:
                torch.nn.functional.linear(x[weight.shape[1]], weight)

        def nvfp4(_: int, x: dict[int, torch.Tensor] = x) -> None:
            for q in four:
                weight = decoded(q.weight, q.weight_scale, q.weight_scale_2, torch.bfloat16)
                torch.nn.functional.linear(x[weight.shape[1]], weight)

        ways = {"bf16": (bf16, 0), "codes": (ours, tokens), "decode": (ours, 0), "nvfp4": (nvfp4, 0)}
        for _ in range(turns):
            for kind, (run, direct) in ways.items():
                start = time.thread_time()
                run(direct)
                spent, name = time.thread_time() - start, f"{kind}_{tokens}_tokens_ms"
                best[name] = min(best.get(name, spent * 1e3), spent * 1e3)
        for kind in [kind for kind in ways if kind != "bf16"]:
            best[f"{kind}_{tokens}_tokens_of_bf16"] = (
                best[f"bf16_{tokens}_tokens_ms"] / best[f"{kind}_{tokens}_tokens_ms"]
            )
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompts", action="store_true", help="time prompts, too, which takes minutes in BF16")
    parser.add_argument("--kernels", nargs="*", default=["rows", "codes", "decode", "nvfp4"], choices=KERNELS)
    parser.add_argument("--products", action="store_true", help="the products of one layer only, without an engine")
    parser.add_argument("--processor-time", action="store_true", help="of engines in one process with one thread")
    parser.add_argument("--as-avx2", action="store_true", help="see a processor with AVX2 and nothing newer")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    from nemo_fp8.extras import require

    require("rollout")
    if options.as_avx2:
        importlib.import_module("support.as_avx2.sitecustomize")
    if options.processor_time:
        os.environ["OMP_NUM_THREADS"] = "1"
    from support.rollout import settings

    settings.put_in_place()
    from support.rollout import engines, models

    from nemo_fp8.rollout.arguments import EXECUTOR

    if options.products:
        print(json.dumps({name: round(value, 2) for name, value in products(options.turns).items()}, indent=1))
        return
    kinds = {"bf16": {"distributed_executor_backend": EXECUTOR}, "spinning": {}}
    kinds |= {kernel: engines.fp8(**KERNELS[kernel]) for kernel in options.kernels}
    from support.rollout.engines import prompts

    jobs = [(batch, 8, tokens) for batch in BATCHES for tokens in (SHORT, LONG)]
    jobs += [(*PROMPT, 1)] if options.prompts else []
    took: dict[str, dict[tuple[int, int, int], float]] = {kind: {} for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        path = models.write(Path(folder) / "model", "qwen3", 0, **SHAPE)
        running = {
            kind: engines.start(
                path, apart=not options.processor_time, **arguments, max_num_batched_tokens=4096, max_model_len=512
            )
            for kind, arguments in kinds.items()
        }
        clock = time.process_time if options.processor_time else time.perf_counter
        for _ in range(options.turns):
            for job in jobs:
                for kind, llm in running.items():
                    time.sleep(0 if options.processor_time else engines.ASLEEP)
                    spent = seconds(llm, prompts(*job[:2]), job[2], clock)
                    took[kind][job] = min(took[kind].get(job, spent), spent)
        for llm in running.values():
            engines.stop(llm)
    found = {kind: rates(of_kind) for kind, of_kind in took.items()}
    best = {f"{kind}_{job}_tokens_s": rate for kind in kinds for job, rate in found[kind].items()}
    for kind in ("spinning", *options.kernels):
        best |= {f"{kind}_{job}_of_bf16": found[kind][job] / found["bf16"][job] for job in found[kind]}
    print(json.dumps({name: round(value, 3) for name, value in best.items()}, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
