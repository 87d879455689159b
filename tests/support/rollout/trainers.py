"""A trainer that pushes through vLLM's weight-transfer API, and what its engine says of its weights."""

from support.rollout.engines import prompts
from support.rollout.models import tensors_of


class Weights:
    """What a trainer gives vLLM: its parameters, as often as they are wanted."""

    def __init__(self, folder):
        self.tensors = dict(tensors_of(folder))
        self.ends_after = None

    def metadata(self):
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

    def __iter__(self):
        for i, pair in enumerate(self.tensors.items()):
            if i == self.ends_after:
                raise OSError("the trainer fell over")
            yield pair


def trainer_of(client, source, **about):
    """By vLLM's own factory, which knows the name since it loaded our plugin."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.plugins import load_general_plugins

    from nemo_fp8.rollout.refit.transfer import NemoFp8TrainerInit

    load_general_plugins()
    return WeightTransferTrainerFactory.trainer_init(NemoFp8TrainerInit(rank=0, **about), client=client, source=source)


def versions_of(llm):
    """The weight versions of an answer's tokens; None where vLLM does not tell."""
    from vllm import SamplingParams

    (answer,) = llm.generate(prompts(1), SamplingParams(max_tokens=3, temperature=0.0), use_tqdm=False)
    spans = getattr(answer.outputs[0], "weight_versions", None)
    return None if spans is None else {span.version for span in spans}
