"""An engine of two workers in a process of its own, asked what its workers hold. ``ask(executor, folder, fields)``.

Ray on a CPU: vLLM's CPU platform has no name for its device there, so a shim gives it Ray's ``GPU``, of which Ray is
told that there are two. That is for this test only; on GPUs nothing of it is needed.
"""

import json
import sys
from pathlib import Path

from support.rollout.alone import answer_of, start_ray


def ask(executor, folder, fields):
    """What the workers answered."""
    return answer_of(__file__, executor, str(folder), json.dumps(fields), timeout=550)


def main(executor, folder, fields, answer, place):
    from support.rollout import engines

    backend = "mp" if executor == "mp" else "ray"
    if backend == "ray":
        start_ray(place)
    fields = json.loads(fields)
    check = {"worker_extension_cls": "support.rollout.worker_check.CheckedWorker"}
    several = {"tensor_parallel_size": 2, "distributed_executor_backend": backend}
    pushed = fields.pop("pushed", None)
    llm = engines.start(folder, **engines.fp8(**fields) | check | several)
    how = ("nemo_fp8_check", (folder, fields.get("weight_scale", "fp32")))
    if fields.get("rollout") == "nvfp4":
        how = ("nemo_fp8_check_four_bits", (folder,))
    answers = {
        "checks": llm.collective_rpc(how[0], args=how[1]),
        "reports": llm.collective_rpc("nemo_fp8_report"),
        "finite": bool(engines.log_probs(llm, count=2).isfinite().all()),
    }
    if pushed:
        from nemo_fp8.rollout import Refit
        from support.rollout.models import tensors_of

        receipt = Refit(llm).push(dict(tensors_of(Path(pushed))), verify=True).require()
        answers["receipt"] = receipt.to_dict()
        answers["after"] = llm.collective_rpc("nemo_fp8_check_four_bits", args=(pushed,))
        answers["stale"] = llm.collective_rpc("nemo_fp8_check_four_bits", args=(folder,))
    Path(answer).write_text(json.dumps(answers))
    engines.stop(llm)
    if backend == "ray":
        import ray

        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
