"""Weight transfer through vLLM's own sequence of calls; and the arguments of its NCCL and IPC backends, which no test
can run here."""

import inspect

import pytest
import torch
from safetensors.torch import load_file
from support.rollout.engines import fp8, log_probs


def test_the_backends_are_what_we_stand_on():
    from nemo_fp8.rollout.refit.worker import transfer as reload_transfer

    for name in reload_transfer.BACKENDS.values():
        backend = getattr(reload_transfer, name)
        assert list(inspect.signature(backend.__init__).parameters)[1:] == ["config", "vllm_config", "device", "model"]
        assert [*inspect.signature(backend.mro()[2].receive_weights).parameters] == ["self", "update_info"]
        assert {"names", "dtype_names", "shapes"} <= set(backend.update_info_cls.__dataclass_fields__)
        assert "self.model.load_weights" in inspect.getsource(backend.mro()[2].receive_weights)
    with pytest.raises(ValueError, match="pickled"):
        reload_transfer._Pushing().parse_update_info({"ipc_handles_pickled": "gASVAAAA"})


@pytest.mark.long
def test_a_transfer_is_bitwise_a_push(engine, checkpoint):
    arguments = fp8() | {
        "worker_extension_cls": "support.rollout.refit_door.DoorWorker",
        "weight_transfer_config": {"backend": "nemo_fp8_files"},
    }
    llm = engine(checkpoint("llama_tied", 0), apart=True, **arguments)
    llm.init_weight_transfer_engine({"init_info": {}})

    def send(seed, change=lambda names: names):
        path = checkpoint("llama_tied", seed) / "model.safetensors"
        tensors = load_file(path)
        names = change([*tensors])
        about = {"dtype_names": ["bfloat16"] * len(names), "shapes": [list(tensors[name].shape) for name in names]}
        llm.start_weight_update()
        llm.update_weights({"update_info": {"path": str(path), "names": names, **about}})
        llm.finish_weight_update()

    old = log_probs(llm, 1, 200)
    send(1)
    new = log_probs(llm, 1, 200)
    send(0)
    assert torch.equal(log_probs(llm, 1, 200), old)
    fresh = engine(checkpoint("llama_tied", 1), apart=True, **fp8())
    assert torch.equal(new, log_probs(fresh, 1, 200))
    with pytest.raises(Exception, match=r"did not come|lacks"):
        send(1, lambda names: names[:-3])
