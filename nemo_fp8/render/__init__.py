"""Write a contract in the settings of other programs: one small module for each outside format.

Every module has ``render(precision) -> Rendering`` and, if the format can be read, a ``from_...`` that returns the
contract. They hold names and tables; nothing here computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.contract.naming import given
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.models.shapes import Model
from nemo_fp8.render import (
    bridge,
    env,
    megatron,
    modelopt,
    nemo_rl,
    nemo_script,
    skyrl,
    slime,
    te,
    te_precision,
    trl,
    verl,
    vllm,
)
from nemo_fp8.render.rendering import Rendering

RENDERERS: dict[str, Callable[[Precision], Rendering]] = {
    "nemo": nemo_script.render,
    "bridge": bridge.render,
    "megatron": megatron.render,
    "te": te.render,
    "nemo-rl": nemo_rl.render,
    "vllm": vllm.render,
    "modelopt": modelopt.render,
    "env": env.render,
    "te-precision": te_precision.render,
    "verl": verl.render,
    "skyrl": skyrl.render,
    "slime": slime.render,
    "trl": trl.render,
}


def render(
    precision: Precision | str,
    to: str,
    layers: int | None = None,
    model: Model | Mapping[str, Any] | str | Path | None = None,
) -> Rendering:
    """Render ``precision``, a contract or the name of one, for ``to``, a key of ``RENDERERS``.

    ``model`` is a config.json: its path, its folder or its content. ModelOpt's lists name its modules, and NeMo RL's
    NVFP4 its last layers, for which ``layers`` does as well. Raises PrecisionError if ``to`` or the name is unknown,
    there is no such model, or the other program cannot do what the contract says.
    """
    if to not in RENDERERS:
        raise PrecisionError([unknown("rendering", to, RENDERERS)])
    contract = given(precision)
    shapes = model if isinstance(model, Model) or model is None else Model.read(model)
    if to == "nemo-rl":
        return nemo_rl.render(contract, layers if layers is not None or shapes is None else shapes.layers)
    return modelopt.render(contract, shapes) if to == "modelopt" else RENDERERS[to](contract)


__all__ = ["RENDERERS", "Rendering", "render"]
