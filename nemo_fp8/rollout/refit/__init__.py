"""Refit: a trainer's weights into a running engine, with a receipt.

    receipt = Refit(llm).push(model.state_dict())
    print(receipt)

``push`` streams, ``manifest`` says what will come, ``stream`` cuts it to buffers, ``memory`` and ``transports`` carry
it, ``control`` speaks to the engine, ``endpoints`` answers for a server, ``receipt`` tells what happened. What runs in
the workers is :mod:`nemo_fp8.rollout.refit.worker.session`.
"""

from nemo_fp8.extras import require

__needs__ = require("numerics")

from nemo_fp8.rollout.refit.control import Control
from nemo_fp8.rollout.refit.fingerprint import fingerprint
from nemo_fp8.rollout.refit.manifest import Entry, Manifest
from nemo_fp8.rollout.refit.push import Refit
from nemo_fp8.rollout.refit.receipt import Receipt, Written

__all__ = ["Control", "Entry", "Manifest", "Receipt", "Refit", "Written", "fingerprint"]
