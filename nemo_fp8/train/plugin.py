"""``MixedPrecision``: NeMo's precision plugin, driven by a contract.

It is a subclass of NeMo's ``MegatronMixedPrecision`` with the same arguments, so that NeMo's strategy and every
``isinstance`` check accept it. What it adds, in the order of a run:

    construction         makes a contract of the arguments, which refuses contradictions that NeMo accepts
    before the model     checks that this machine can run the contract, and chooses the engine
    after the overrides  checks model, DDP and optimizer configs again: NeMo checks them only before the overrides
    before training      repairs what NeMo 2.7.3 breaks (``repairs.py``)

The contract is the only setting; everything else is read from the configs of the run.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from nemo_fp8.extras import require

__needs__ = require("train")

from nemo.lightning.pytorch.plugins.mixed_precision import DtypeConfig, MegatronMixedPrecision

from nemo_fp8.contract import Precision
from nemo_fp8.preflight.engine import choose_engine
from nemo_fp8.render.nemo import beyond_nemo, changes_from_nemo, from_nemo, resolve_dtypes, to_nemo
from nemo_fp8.train import checks, repairs, row_casts
from nemo_fp8.train.first_weights import give_first_weights, true_first_weights
from nemo_fp8.train.kept import keep_modules
from nemo_fp8.train.loading import require_loadable
from nemo_fp8.train.megatron_cpu import hold_cpu
from nemo_fp8.train.signature import PARAMETERS, as_nemo, takes


def plugin_arguments(precision: Precision) -> dict[str, Any]:
    """Return the plugin's arguments for a contract: NeMo's, and the fields for which NeMo has no argument."""
    return resolve_dtypes(to_nemo(precision)) | beyond_nemo(precision)


@dataclass
class _LeavesFp8Alone(DtypeConfig):
    """The dtypes of a contract without FP8. They have no FP8 fields, so NeMo's overrides leave the model's alone.

    NeMo's own dtypes would erase ``fp8=`` from the model's config without a word. Here it stays, and the check after
    the overrides reports it.
    """

    fp8: ClassVar[None] = None
    fp8_recipe: ClassVar[None] = None
    fp8_param: ClassVar[bool] = False
    fp4: ClassVar[None] = None


class MixedPrecision(MegatronMixedPrecision):
    """NeMo's plugin for mixed precision, driven by a contract.

    ``engine`` is what runs the FP8 GEMMs below TransformerEngine: ``te`` (its kernels, on a GPU), ``emulated``
    (``nemo_fp8.te_cpu``, on a CPU), or ``auto``, the one that this machine has. Raises PrecisionError if the arguments
    contradict each other.
    """

    @takes(map(as_nemo, PARAMETERS))
    def __init__(self, precision: str | int = "bf16-mixed", *, engine: str | None = None, **settings: Any) -> None:
        self.contract = from_nemo({"precision": precision, **settings})
        self.engine = engine or "auto"
        self._contexts = ExitStack()
        super().__init__(**resolve_dtypes(to_nemo(self.contract)))
        if not self.contract.is_quantized:
            kept = {f.name for f in fields(_LeavesFp8Alone)}
            theirs = {name: value for name, value in vars(self.dtype_config).items() if name in kept}
            self.dtype_config: DtypeConfig = _LeavesFp8Alone(**theirs)

    def replace(self, **changes: Any) -> MixedPrecision:
        """Return the plugin with some arguments changed, as construction takes them; raises what it raises."""
        engine = changes.pop("engine", self.engine)
        contract = self.contract.replace(**changes_from_nemo(changes, base=self.contract))
        return type(self)(**plugin_arguments(contract), engine=engine)

    # ------------------------------------------------------------------ hooks, in the order of a run

    @contextmanager
    def module_init_context(self) -> Generator[None, None, None]:
        """Check the machine and choose the engine before the model is built, when a refusal costs nothing."""
        self._contexts.close()
        choose_engine(self.contract, self.engine)
        hold_cpu(self._contexts, self.contract)
        if self.contract.fp8_param:
            row_casts.hold_row_casts(self._contexts, self.contract)
        with super().module_init_context(), true_first_weights() if self.contract.fp8_param else nullcontext():
            yield

    def convert_module(self, module: Any) -> Any:
        """Repair and check configs after NeMo's overrides; raise PrecisionError for what is against the contract."""
        run = checks.Run.of(module)
        repairs.before_ddp(self.contract, run)
        checks.require_agreement(self.contract, run)
        require_loadable(module)
        give_first_weights(module)
        keep_modules(module, self.contract)
        return super().convert_module(module)

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Repair the model and the optimizer once both are built, before the first step."""
        if optimizers:
            repairs.before_training(self.contract, model, optimizers)
        return super().connect(model, optimizers, lr_schedulers)  # type: ignore[no-any-return]

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        """Run the step, then repair what it left wrong."""
        output = super().optimizer_step(optimizer, model, closure, **kwargs)
        repairs.after_step(self.contract, model, optimizer)
        return output

    def teardown(self) -> None:
        """Close every context at the end of a run, also after an error."""
        self._contexts.close()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        # NeMo copies the plugin into its records; open contexts cannot be copied.
        return {name: value for name, value in vars(self).items() if name != "_contexts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _contexts=ExitStack())
