"""Refit: push a trainer's weights into a running engine, and get a receipt.

    receipt = Refit(llm).push(model.state_dict())
    print(receipt)

Read ``push`` first, which is the whole of it on one page, and then ``worker.routes``, which finds where tensors go.

    push          the order of things, on the trainer's side
    manifest      what a push will bring
    casting       tensors that the trainer casts on their way
    ledger        the engine's bits on the trainer's side; planes finds what differs from them
    patch         differences of bits, as bytes
    wire, memory  tensors cut into buffers, and the way of a buffer to the workers; channel tells them of it
    control       calls to an engine: in this process, on an asyncio loop, or over HTTP; alive ends those to a dead one
    door          the server's side of HTTP
    fingerprint   a short name for the bytes of a tensor
    receipt       what a push did
    worker        the workers' side: session, patches, plan, keeping, routes, sinks, layouts
"""

from nemo_fp8.extras import require

__needs__ = require("numerics")

from nemo_fp8.rollout.refit.control import Control
from nemo_fp8.rollout.refit.fingerprint import fingerprint
from nemo_fp8.rollout.refit.manifest import Entry, Manifest
from nemo_fp8.rollout.refit.memory import SharedWeights
from nemo_fp8.rollout.refit.push import Refit
from nemo_fp8.rollout.refit.receipt import Delta, Receipt, Written

__all__ = ["Control", "Delta", "Entry", "Manifest", "Receipt", "Refit", "SharedWeights", "Written", "fingerprint"]
