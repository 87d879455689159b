"""``ContractPrecision``: Megatron-Bridge's ``MixedPrecisionConfig``, driven by a contract.

It is a subclass with the same fields, so that Bridge applies it as its own. What it adds happens in ``setup``, which
Bridge calls on every rank when it has resolved the configs of a run and before anything is built:

    before    checks that this machine can run the contract; replaces what has to be (``patches.py``)
    Bridge    writes the fields into the configs of model, optimizer and DDP, over whatever they held
    after     checks these configs against the contract; has the model, once built, looked after (``loading.py``)

The fields are the setting: ``config.mixed_precision.fp8_margin = 1`` works as with Bridge's own. ``beyond`` holds what
the contract says and Bridge has no field for, such as ``keep`` and ``modules``. These are carried out by hooks on the
linears and not by Megatron's ``quant_recipe``, which a rendering writes: ``render/bridge.py`` says where they differ. A
``quant_recipe`` of the provider's is left as it is.

A checkpoint's ``run_config.yaml`` names this class, so instantiating the whole file again needs nemo_fp8; Bridge
itself reads only plain values from it when it resumes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from nemo_fp8.extras import require

__needs__ = require("bridge")

from megatron.bridge.training import mixed_precision as theirs

from nemo_fp8.bridge.loading import look_after_weights
from nemo_fp8.bridge.patches import FOR_THE_PROCESS, replace_for_bridge
from nemo_fp8.contract import Precision
from nemo_fp8.contract.naming import given
from nemo_fp8.contract.presets import PRESETS
from nemo_fp8.preflight.engine import choose_engine
from nemo_fp8.render.bridge import from_bridge, to_bridge
from nemo_fp8.render.nemo import beyond_nemo, resolve_dtypes
from nemo_fp8.train.checks import Run, require_agreement
from nemo_fp8.train.megatron_cpu import hold_products


@dataclass
class ContractPrecision(theirs.MixedPrecisionConfig):
    """Bridge's precision settings, checked against the machine and the run: see the module. Make it by
    :func:`bridge_config`."""

    beyond: dict[str, Any] = field(default_factory=dict)
    """Fields of the contract that Bridge has none for, as plain values."""

    @property
    def contract(self) -> Precision:
        """The contract that the fields say now. Raises PrecisionError if they contradict each other."""
        said = {f.name: getattr(self, f.name) for f in fields(theirs.MixedPrecisionConfig)}
        return from_bridge(said).replace(**self.beyond)

    def finalize(self) -> None:
        """Raise PrecisionError for contradictions, before Bridge's own assertions."""
        _ = self.contract
        super().finalize()

    def setup(self, model_config: Any, optimizer_config: Any = None, ddp_config: Any = None) -> None:
        """Write the settings into the configs of a run, and check machine and configs.

        Raises PrecisionError if this machine cannot run the contract, or with every setting of the configs against it.
        """
        contract = self.contract
        choose_engine(contract)
        replace_for_bridge()
        hold_products(FOR_THE_PROCESS, contract)
        super().setup(model_config, optimizer_config, ddp_config)
        require_agreement(contract, Run(model_config, ddp_config, optimizer_config))
        look_after_weights(model_config, contract)


def bridge_config(contract: Precision | str) -> ContractPrecision:
    """Return the value for ``ConfigContainer.mixed_precision`` of a contract, a preset's name or a YAML file.

    Raises PrecisionError if there is no such preset or file.
    """
    precision = given(contract)
    values, beyond = precision.to_dict(), sorted(beyond_nemo(precision))
    return ContractPrecision(**resolve_dtypes(to_bridge(precision)), beyond={name: values[name] for name in beyond})


def register_presets() -> tuple[str, ...]:
    """Let Bridge's registry make ours of every preset's name, with underscores or hyphens; return the names.

    Names that Bridge has already keep their values, which a test compares, and get our checks. A name that is no preset
    of ours stays Bridge's.
    """
    for name in PRESETS:
        theirs.register(_recipe(name))
    return tuple(PRESETS)


def _recipe(name: str) -> Any:
    def make() -> ContractPrecision:
        return bridge_config(PRESETS[name])

    make.__name__ = make.__qualname__ = name
    return make
