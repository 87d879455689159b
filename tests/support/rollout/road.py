"""In vLLM's environment: an engine on random weights takes what Bridge trained by a push, and the gate judges it.

python -m support.rollout.road FOLDER          see support.bridge.road; prints JSON
"""

import json
import sys
from pathlib import Path

from support.rollout import settings

settings.put_in_place()


def main(folder):
    import torch
    from safetensors.torch import load_file
    from vllm import SamplingParams

    from nemo_fp8 import Precision
    from nemo_fp8.mismatch import Gate, LogProbs, predict
    from nemo_fp8.rollout import Refit, engine_args
    from support.bridge.road import CONTRACT
    from support.rollout.engines import start, stop

    precision = Precision.from_dict(CONTRACT)
    weights, trainer = load_file(folder / "trained/model.safetensors"), load_file(folder / "log_probs.safetensors")
    tokens = trainer["tokens"]
    llm = start(
        folder / "trained",
        load_format="dummy",
        skip_tokenizer_init=True,
        **{"max_model_len": 64} | engine_args(precision),
    )

    def judged(own):
        asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        answers = [llm.generate({"prompt_token_ids": row}, asked, use_tqdm=False)[0] for row in tokens.tolist()]
        rows = [
            [place[t].logprob for place, t in zip(a.prompt_logprobs[1:], a.prompt_token_ids[1:], strict=True)]
            for a in answers
        ]
        return Gate().judge(own, LogProbs(trainer["log_probs"], torch.tensor(rows)))

    config = json.loads((folder / "trained/config.json").read_text())
    own = predict(config, weights, tokens, precision)
    before = judged(own)
    receipt = Refit(llm).push(weights, verify=True)
    after = judged(own)
    stop(llm)
    said = {"ok": receipt.ok, "receipt": str(receipt), "before": before.fired, "after": after.fired, "said": str(after)}
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
