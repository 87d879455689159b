"""Train Hugging Face weights in Bridge, and write what a rollout needs: the trained weights and their log-probs.

    python -m support.bridge.road FOLDER

``FOLDER/start`` is the checkpoint to start from and ``FOLDER/trained`` the trained one, out of the master weights;
``FOLDER/codes.safetensors`` is what the FP8 codes stand for, and ``FOLDER/log_probs.safetensors`` holds ``tokens`` and
the trainer's ``log_probs``.
"""

import shutil
import sys
from pathlib import Path

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
CONTRACT = {"format": "e4m3", "scaling": "blockwise", "fp8_param": True, "name": "blockwise"}
STEPS = 4


def main(folder):
    import torch
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from safetensors.torch import save_file

    from nemo_fp8 import Precision
    from nemo_fp8.bridge import bridge_config, hugging_face_weights
    from support.bridge.tiny import VOCABULARY, config, hugging_face

    hugging_face("llama", folder / "start", **SIZES)
    bridge = AutoBridge.from_hf_pretrained(folder / "start")

    class Out(Callback):
        def on_train_end(self, context):
            (folder / "trained").mkdir()
            shutil.copy(folder / "start/config.json", folder / "trained")
            masters = dict(hugging_face_weights(bridge, context.model, context.optimizer))
            save_file({k: v.contiguous() for k, v in masters.items()}, folder / "trained/model.safetensors")
            codes = dict(bridge.export_hf_weights(context.model, cpu=True, show_progress=False))
            save_file({k: v.contiguous() for k, v in codes.items()}, folder / "codes.safetensors")
            draws = torch.Generator().manual_seed(7)
            tokens = torch.randint(0, VOCABULARY - 1, (16, 49), generator=draws)
            places = torch.arange(48).expand(16, -1)
            (model,) = context.model
            model.eval()
            with torch.no_grad():
                loss = model(tokens[:, :-1].contiguous(), places, None, labels=tokens[:, 1:].contiguous())
            model.train()
            save_file({"tokens": tokens, "log_probs": -loss.float().contiguous()}, folder / "log_probs.safetensors")

    provider = bridge.to_megatron_provider()
    provider.seq_length = 32
    cfg = config(provider, bridge_config(Precision.from_dict(CONTRACT)), STEPS)
    pretrain(cfg, forward_step, callbacks=[Out()])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
