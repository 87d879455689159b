"""Write a contract in the settings of other programs: one small module for each outside format.

Every module has ``render(precision) -> Rendering`` and, if the format can be read, a ``from_...`` that returns the
contract. They hold names and tables; nothing here computes.
"""

from __future__ import annotations

from collections.abc import Callable

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.render import bridge, env, megatron, nemo, nemo_rl, skyrl, slime, te, te_precision, trl, verl, vllm
from nemo_fp8.render.rendering import Rendering

RENDERERS: dict[str, Callable[[Precision], Rendering]] = {
    "nemo": nemo.render,
    "bridge": bridge.render,
    "megatron": megatron.render,
    "te": te.render,
    "nemo-rl": nemo_rl.render,
    "vllm": vllm.render,
    "env": env.render,
    "te-precision": te_precision.render,
    "verl": verl.render,
    "skyrl": skyrl.render,
    "slime": slime.render,
    "trl": trl.render,
}


def render(precision: Precision, to: str, layers: int | None = None) -> Rendering:
    """Render ``precision`` for ``to``, a key of ``RENDERERS``. Raises PrecisionError if ``to`` is unknown.

    ``layers`` is the number of the model's decoder layers; NeMo RL's NVFP4 names the last ones by it.
    """
    if to not in RENDERERS:
        raise PrecisionError([unknown("rendering", to, RENDERERS)])
    return nemo_rl.render(precision, layers) if to == "nemo-rl" else RENDERERS[to](precision)


__all__ = ["RENDERERS", "Rendering", "render"]
