"""The CPU as CUDA device 0: what TE and Megatron ask of ``torch.cuda`` and of tensors, answered by the CPU.

    device="cuda"            the CPU, in every factory, in ``.to``, ``torch.load`` and ``torch.Generator``
    torch.device(0)          the CPU: of a number alone a torch without CUDA makes no device, where
                             ``torch.device("cuda", 0)`` is torch's own, and names the CPU wherever it is asked for
    tensor.is_cuda           True: TE and Megatron assert on it
    torch.cuda.*             one device of the architecture that is stood for; streams and events order what is ordered
                             anyway

Names of torch are replaced, each a row with its reason, for the rest of the process. A ``TorchFunctionMode`` would come
and go, and does not do: torch leaves a mode during every call that the mode handles, ``Tensor.backward`` included, and
a mode belongs to one thread, where autograd runs backward in others.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import os
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import profiler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _device

from nemo_fp8.te_cpu.memory import COUNT, HOST, parts_of
from nemo_fp8.te_cpu.refusals import REFUSED, refused, refusing
from nemo_fp8.te_cpu.streams import CUDART, MARKS, Chosen, Event, Stream
from nemo_fp8_hook import ARCHITECTURES

CPU = torch.device("cpu")

_arch: list[int] = []


def stand_in(arch: int) -> None:
    """Take the CPU for a CUDA device of that architecture, until the process ends."""
    importlib.import_module(
        "torch._dynamo"
    )  # it maps torch's functions by name at its import, and refuses two names for one function
    _device._device_constructors()  # what `with torch.device("meta")` looks for: torch's own functions, which ours call

    _arch[:] = [arch]
    # Files that a GPU has written; torch asks in the order of these numbers, and for CUDA at 20.
    torch.serialization.register_package(
        15, lambda storage: None, lambda storage, at: storage if names_cuda(at) else None
    )
    for owner, table in _tables():
        for name, (replacement, _) in table.items():
            if hasattr(owner, name):  # an older torch has fewer
                setattr(owner, name, replacement)
    _take_away_pools()
    schemas: Any = importlib.import_module("torch._library.infer_schema")
    schemas.SUPPORTED_PARAM_TYPES.update(schemas.get_supported_param_types())  # an operator's types, by their identity
    graphs: Any = importlib.import_module("torch.fx.graph")  # their source names devices, of the type that torch has
    graphs._register_custom_builtin("device", "from torch import device", torch.device)
    scripts: Any = importlib.import_module("torch.jit._builtins")
    scripts._register_builtin(torch.device, scripts._find_builtin(_device_of_torch))
    for name in _FACTORIES:  # torch.jit.script knows torch's functions by their identity, too
        factory: Any = getattr(torch, name)
        scripts._register_builtin(factory, scripts._find_builtin(factory.__wrapped__))


def standing_for() -> int | None:
    """Return the architecture that is stood for; None if there is none."""
    return _arch[0] if _arch else None


def multiplies_fp8_in_any_layout() -> bool:
    """Return whether the GPU stood for multiplies FP8 matrices however they lie (Blackwell); Hopper needs both by rows,
    so TE keeps transposes."""
    return 100 <= _arch[0] < 120


def names_cuda(device: object) -> bool:
    """Return whether this names a CUDA device, by string, torch.device or number."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


# ---------------------------------------------------------------------- torch.cuda


class _Chance(torch.Generator):
    """CUDA's generator. TE's kernels draw from it, and nothing else does.

    torch's operators on ``cuda`` run on the CPU and draw from the CPU's generator, so that a state of CUDA's holds that
    one's, too. A data loader draws from the CPU's alone: as on a GPU, it changes no number that a kernel draws, and a
    run that restores CUDA's state goes on to the bit.
    """

    def manual_seed(self, seed: int) -> torch.Generator:
        torch.default_generator.manual_seed(seed)
        return super().manual_seed(seed)

    def get_state(self) -> torch.Tensor:
        return torch.cat([torch.default_generator.get_state(), super().get_state()])

    def set_state(self, new_state: torch.Tensor) -> torch.Generator:
        size = super().get_state().numel()  # a checkpoint of nemo_fp8 0.2.0 holds one state, of both
        of_the_cpu, of_kernels = new_state[:size], new_state[-size:]
        torch.default_generator.set_state(of_the_cpu.clone())  # torch crashes at a view of a state
        return super().set_state(of_kernels.clone())


CHANCE = _Chance()
CHANCE.seed()  # by a number that nobody chose, as torch's own generators begin


class _OneGenerator:
    """``torch.cuda.default_generators``: the same, whatever the index."""

    def __getitem__(self, device: object) -> torch.Generator:
        return CHANCE

    def __len__(self) -> int:
        return 1


def _memory() -> tuple[int, int]:
    """Return how many bytes are free, and how many there are: the machine's own, which an allocation on ``cuda``
    takes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _properties(device: object = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        major=_arch[0] // 10, minor=_arch[0] % 10, multi_processor_count=132, total_memory=_memory()[1], warp_size=32,
        name=f"a CPU that stands for {ARCHITECTURES[_arch[0]]}", L2_cache_size=50 << 20,
        shared_memory_per_block_optin=232448, )  # fmt: skip


def _nested(flat: dict[str, int]) -> dict[str, Any]:
    """Return statistics whose names have dots as nested dicts, each part of a name a level of its own."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *levels, last = name.split(".")
        functools.reduce(lambda level, part: level.setdefault(part, {}), levels, nested)[last] = value
    return nested


def _answers(value: Any) -> Callable[..., Any]:
    """Return a function that gives ``value``, a new one for each name: torch.compile knows functions by their identity,
    and refuses one that stands for two."""
    return lambda *args, **kwargs: value


def _fraction(fraction: float, device: object = None) -> None:
    """Refuse to hold a process to a part of the memory; the whole (1.0) is what it may take anyway."""
    if fraction != 1.0:
        refusing(
            f"torch.cuda.set_per_process_memory_fraction({fraction})",
            "nobody holds a process to a part of the machine's memory here",
            "Leave it out, or limit the process (ulimit -v)",
        )()


def _warn_of_waits(debug_mode: int | str) -> None:
    """Refuse to warn of waits for the GPU, of which there are none: nobody would be warned."""
    if debug_mode not in (0, "default"):
        refusing(
            f"torch.cuda.set_sync_debug_mode({debug_mode!r})", "the CPU waits for no GPU, and would never warn of it"
        )()


_STREAM = Stream()
_ONE_DEVICE = "there is one device, and it is there"
_ORDERED = "the CPU does one thing after the other"
_GENERATOR = "random numbers come from the CPU's generator, and those of TE's kernels from one beside it"
_HELD = "a tensor holds the CPU's memory, and what it no longer holds is kept for nobody"

_CUDA: dict[str, tuple[Any, str]] = {
    "is_available": (_answers(True), _ONE_DEVICE),
    "is_initialized": (_answers(True), _ONE_DEVICE),
    "init": (_answers(None), _ONE_DEVICE),
    "_lazy_init": (_answers(None), _ONE_DEVICE),
    "_lazy_call": (lambda call, **kwargs: call(), _ONE_DEVICE),
    "_is_in_bad_fork": (_answers(False), "there is no driver that a fork could break"),
    "device_count": (
        lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "every rank of this machine has a device of its own",
    ),
    "current_device": (_answers(0), _ONE_DEVICE),
    "set_device": (_answers(None), _ONE_DEVICE),
    "device": (Chosen, _ONE_DEVICE),
    "device_of": (Chosen, _ONE_DEVICE),
    "get_device_properties": (_properties, "TE chooses recipes and layouts by it"),
    "get_device_name": (lambda device=None: _properties().name, "logs say what it is"),
    "get_device_capability": (
        lambda device=None: (_arch[0] // 10, _arch[0] % 10),
        "TE chooses recipes and layouts by it",
    ),
    "is_bf16_supported": (_answers(True), "every CPU computes BF16, if slowly"),
    "synchronize": (_answers(None), _ORDERED),
    "Stream": (Stream, _ORDERED),
    "ExternalStream": (Stream, _ORDERED),
    "Event": (Event, "what was asked for is done, and when it was is the clock's"),
    "current_stream": (_answers(_STREAM), _ORDERED),
    "default_stream": (_answers(_STREAM), _ORDERED),
    "stream": (lambda stream: nullcontext(), _ORDERED),
    "set_stream": (_answers(None), _ORDERED),
    "_cudart": (CUDART, "a profiler is told when to begin and end, and there is none of CUDA's"),
    "is_current_stream_capturing": (_answers(False), "there are no CUDA graphs"),
    "manual_seed": (CHANCE.manual_seed, _GENERATOR),
    "manual_seed_all": (CHANCE.manual_seed, _GENERATOR),
    "get_rng_state": (lambda device="cuda": CHANCE.get_state(), _GENERATOR),
    "set_rng_state": (lambda new_state, device="cuda": CHANCE.set_state(new_state), _GENERATOR),
    "default_generators": (_OneGenerator(), _GENERATOR),
    "empty_cache": (_answers(None), _HELD),
    "ipc_collect": (_answers(None), _HELD),
    "memory_allocated": (COUNT.now, _HELD),
    "max_memory_allocated": (COUNT.peak, _HELD),
    "memory_reserved": (lambda device=None: COUNT.now(), _HELD),
    "max_memory_reserved": (lambda device=None: COUNT.peak(), _HELD),
    "reset_peak_memory_stats": (COUNT.reset, _HELD),
    "reset_max_memory_allocated": (lambda device=None: COUNT.reset(), _HELD),
    "reset_accumulated_memory_stats": (_answers(None), "nothing is accumulated"),
    "mem_get_info": (lambda device=None: _memory(), "the memory of the machine is what there is"),
    "memory_stats": (COUNT.stats, _HELD),
    "memory_summary": (COUNT.summary, _HELD),
    "memory_stats_as_nested_dict": (lambda device=None: _nested(COUNT.stats(device)), _HELD),
    "device_memory_used": (
        lambda device=None: _memory()[1] - _memory()[0],
        "the memory of the machine is what there is",
    ),
    "reset_accumulated_host_memory_stats": (_answers(None), "nothing is accumulated"),
    "reset_peak_host_memory_stats": (_answers(None), "nothing is accumulated"),
    "get_per_process_memory_fraction": (_answers(1.0), "nobody holds a process to a part of it"),
    "set_per_process_memory_fraction": (_fraction, "nobody holds a process to a part of it"),
    "get_sync_debug_mode": (_answers(0), "nobody waits for a GPU"),
    "set_sync_debug_mode": (_warn_of_waits, "nobody waits for a GPU"),
    "can_device_access_peer": (_answers(False), "a rank is a process, and reads no other's memory"),
    "get_stream_from_external": (_answers(_STREAM), _ORDERED),
}


# ---------------------------------------------------------------------- torch and its tensors

_FACTORIES = """empty zeros ones full tensor as_tensor asarray rand randn randint randperm arange linspace logspace eye
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like empty_strided scalar_tensor tril_indices
    triu_indices range normal empty_permuted empty_quantized hann_window hamming_window blackman_window bartlett_window
    kaiser_window sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor
    sparse_compressed_tensor""".split()
_TYPES = "Float Half BFloat16 Double Byte Char Short Int Long Bool".split()
_POOL = "MemPool"
REMOVED = {
    _POOL: "where there is one, Megatron compiles a CUDA extension at its import "
    "(megatron.core.inference.unified_memory), and waits for ever, without a word, once a process has been killed that "
    "compiled it"
}
"""Names of torch.cuda that go, as in a torch that has none, and why."""
_SPREADING = "replicate scatter_gather parallel_apply".split()
_METHODS = "new new_empty new_zeros new_ones new_full new_tensor new_empty_strided".split()


def _on_cpu(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, on the CPU wherever a CUDA device is asked for; what should be pinned is the host's."""

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if "device" in kwargs and names_cuda(kwargs["device"]):
                kwargs["device"] = CPU
            if kwargs.pop("pin_memory", None):
                return HOST.take(call(*args, **kwargs))
        return call(*args, **kwargs)

    return wrapper


def _factory(name: str) -> Callable[..., Any]:
    """Return one of torch's factories, on the CPU, which is pickled by its name as torch's own is."""
    wrapper = _on_cpu(getattr(torch, name))
    wrapper.__module__, wrapper.__qualname__ = "torch", name
    return wrapper


_type, _load, _generator, _device_of_torch = torch.Tensor.type, torch.load, torch.Generator, torch.device
_event, _stream = torch.Event, torch.Stream


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into memory of its own, the scales of a quantized one too, which TE's ``clone`` shares."""
    copy = tensor.clone()
    _part(copy, tensor)
    return copy


def _part(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy what a tensor still shares with the one that it was cloned of."""
    for name, part in parts_of(copy):
        if part is getattr(tensor, name):
            setattr(copy, name, part.clone())
        else:
            _part(part, getattr(tensor, name))


_move, _fetch, _parse = torch.Tensor.to, torch.Tensor.cpu, torch._C._nn._parse_to


@functools.wraps(_move)
def _move_to_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    where = (args[0] if args else kwargs.get("device")) if args or kwargs else None
    args, kwargs = _to_cpu(args, kwargs)
    moved = _move(self, *args, **kwargs)
    if isinstance(where, str) and where == "cpu":
        return HOST.take(_copied(moved) if moved is self else moved)
    comes = moved is self and (names_cuda(where) or isinstance(where, _device_of_torch)) and HOST.holds(self)
    return _copied(moved) if comes else moved


@functools.wraps(_fetch)
def _copy_to_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Copy a GPU's tensor to the CPU: into memory of its own, which keeps the values of now."""
    fetched = _fetch(self, *args, **kwargs)
    return HOST.take(_copied(fetched) if fetched is self else fetched)


def _send(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """Send what the host holds to the GPU: return a copy in memory of its own."""
    return _copied(self) if HOST.holds(self) else self


def _pin(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return HOST.take(self)


@functools.wraps(_parse)
def _parse_for_cpu(*args: Any, **kwargs: Any) -> Any:
    """Return what ``to`` of a module asks for, with the CPU in the place of a GPU."""
    args, kwargs = _to_cpu(args, kwargs)
    return _parse(*args, **kwargs)


def _to_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a ``to`` with the CPU in the place of a GPU, whose number may stand for it."""
    if args and names_cuda(args[0]):
        args = (CPU, *args[1:])
    if kwargs and names_cuda(kwargs.get("device")):
        kwargs = kwargs | {"device": CPU}
    return args, kwargs


_ddp = DistributedDataParallel.__init__


@functools.wraps(_ddp)
def _ddp_of_cpus(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Construct DDP without the numbers of GPUs, for which a module of the CPU is refused."""
    args = (*(None for _ in args[:2]), *args[2:])
    _ddp(self, module, *args, **(kwargs | {name: None for name in ("device_ids", "output_device") if name in kwargs}))


_fsdp = FullyShardedDataParallel.__init__
_FSDP = inspect.signature(_fsdp)


@functools.wraps(_fsdp)
def _fsdp_of_cpus(*args: Any, **kwargs: Any) -> None:
    """Construct FSDP on the CPU, whichever GPU a rank names, or none: of a module on a GPU it would read which."""
    asked = _FSDP.bind(*args, **kwargs)
    if asked.arguments.get("device_id") is None or names_cuda(asked.arguments["device_id"]):
        asked.arguments["device_id"] = CPU
    _fsdp(*asked.args, **asked.kwargs)


@functools.wraps(_type)
def _type_as_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not args and not kwargs:
        return str(_type(self)).replace("torch.", "torch.cuda.", 1)
    if args and isinstance(args[0], str):
        args = (args[0].replace("torch.cuda.", "torch."), *args[1:])
    return _type(self, *args, **kwargs)


@functools.wraps(_load)
def _load_on_cpu(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    return _load(f, map_location=CPU if names_cuda(map_location) else map_location, **kwargs)


class _AnyGenerator(type(_generator)):  # type: ignore[misc]
    """Every generator is an instance of :class:`_Generator`, torch's own ones, which came before, among them."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _generator)


class _Generator(_generator, metaclass=_AnyGenerator):  # type: ignore[misc, valid-type]
    """A generator for "cuda" is one for the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _generator.__new__(_generator, CPU if names_cuda(device) else device)  # type: ignore[call-arg]


class _AnyDevice(type):
    """Devices are torch's own, whoever makes them; only what a number alone means is ours to say."""

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        where = args[0] if args else kwargs.get("device")
        return CPU if isinstance(where, int) and where >= 0 else _device_of_torch(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _device_of_torch)

    def __subclasscheck__(cls, other: type) -> bool:
        return other is cls or issubclass(other, _device_of_torch)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_device_of_torch, name)


class _Device(metaclass=_AnyDevice):
    __doc__ = _device_of_torch.__doc__


_Device.__module__, _Device.__name__, _Device.__qualname__ = "torch", "device", "device"


class _AnyEvent(type(_event)):  # type: ignore[misc]
    """Every event is an instance of :class:`_Event`, as with generators."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _event)


class _Event(_event, metaclass=_AnyEvent):  # type: ignore[misc, valid-type]
    """An event of "cuda" is a moment."""

    def __new__(cls, device: Any = "cuda", **kwargs: Any) -> Any:
        return Event() if names_cuda(device) else _event(device, **kwargs)


class _AnyStream(type(_stream)):  # type: ignore[misc]
    """Every stream is an instance of :class:`_Stream`, as with generators."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _stream)


class _Stream(_stream, metaclass=_AnyStream):  # type: ignore[misc, valid-type]
    """A stream of "cuda" orders nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        where = args[0] if args else kwargs.get("device", None if kwargs else "cuda")
        return _STREAM if names_cuda(where) else _stream(*args, **kwargs)


_supported = importlib.import_module("torch.optim.optimizer")._get_capturable_supported_devices


@functools.wraps(_supported)
def _supported_and_cpu(*args: Any, **kwargs: Any) -> list[str]:
    """Return where an optimizer may keep its steps in tensors, as ``capturable=True`` asks for."""
    return [*_supported(*args, **kwargs), "cpu"]


_set_default = torch.set_default_device


@functools.wraps(_set_default)
def _set_default_but_cuda(device: Any) -> None:
    """Set the default device; for CUDA this is the CPU, with which torch begins."""
    _set_default(None if names_cuda(device) else device)


_profile = profiler.profile.__init__


@functools.wraps(_profile)
def _profile_the_cpu(
    self: Any, *args: Any, use_cuda: bool = False, use_device: str | None = None, **named: Any
) -> None:
    """Profile without the times of a GPU's kernels: torch, built without CUDA, would say so at every operator, at
    length."""
    _profile(self, *args, use_device=None if use_device == "cuda" else use_device, **named)


_Autocast: Any = torch.amp.autocast_mode.autocast
_enter, _exit = _Autocast.__enter__, _Autocast.__exit__
_OTHER = {"cpu": "cuda", "cuda": "cpu"}


def _enter_both(self: Any) -> Any:
    """Enter CUDA's autocast and the CPU's, whichever is entered: torch's operators ask for the second, TE and Megatron
    for the first."""
    entered = _enter(self)
    other = _OTHER.get(self.device)
    if other is not None:
        self.other = other, torch.is_autocast_enabled(other), torch.get_autocast_dtype(other)
        torch.set_autocast_enabled(other, self._enabled)
        torch.set_autocast_dtype(other, self.fast_dtype)
    return entered


def _exit_both(self: Any, *exc: Any) -> Any:
    if self.device in _OTHER:
        other, enabled, dtype = self.other
        torch.set_autocast_enabled(other, enabled)
        torch.set_autocast_dtype(other, dtype)
    return _exit(self, *exc)


_device_of_context, _mesh = _device.DeviceContext.__init__, DeviceMesh.__init__


_index_of_device = torch.Tensor.get_device


def _get_device(self: torch.Tensor) -> int:
    """Return 0 of what lies on the CPU, as ``torch.cuda.current_device()`` says, and -1 of what lies nowhere."""
    return 0 if self.device.type == "cpu" else _index_of_device(self)


def _on_one_device(
    module: torch.nn.Module, inputs: Any, device_ids: Any = None, output_device: object = None, dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Run ``data_parallel`` as a call of the module, unless it names several GPUs."""
    if device_ids is not None and len(device_ids) > 1:
        refusing(
            "torch.nn.parallel.data_parallel of several GPUs",
            "the CPU is one",
            "Start a process for each part (DistributedDataParallel)",
        )()
    inputs = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    return module(*inputs, **(module_kwargs or {}))


def _context_of_cpu(self: Any, device: Any) -> None:
    _device_of_context(self, CPU if names_cuda(device) else device)


@functools.wraps(DeviceMesh.__init__)
def _mesh_of_cpus(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    _mesh(self, "cpu" if names_cuda(device_type) else device_type, *args, **kwargs)


def _itself(self: Any, *args: object, **kwargs: object) -> Any:
    return self


def _tables() -> list[tuple[Any, dict[str, tuple[Any, str]]]]:
    """Return every replaced name, by its owner, with the reason."""
    parts = [importlib.import_module(f"torch.cuda.{name}") for name in ("random", "memory", "streams", "graphs")]
    allocates = "it allocates on cuda by name"
    of_torch: dict[str, tuple[Any, str]] = {name: (_factory(name), allocates) for name in _FACTORIES}
    of_torch |= {
        "Generator": (_Generator, _GENERATOR),
        "device": (_Device, "torch.device(0) asks for a CUDA build, and current_device is a number"),
        "Event": (_Event, _ORDERED),
        "Stream": (_Stream, _ORDERED),
        "load": (_load_on_cpu, "checkpoints are mapped to cuda by name"),
        "set_default_device": (_set_default_but_cuda, "the default device is the CPU, or meta"),
    }
    of_tensors: dict[str, tuple[Any, str]] = {
        name: (_on_cpu(getattr(torch.Tensor, name)), allocates) for name in _METHODS
    }
    of_tensors |= {
        "_make_wrapper_subclass": (
            staticmethod(_on_cpu(torch.Tensor._make_wrapper_subclass)),
            "TE gives its tensors a device by number",
        ),
        "to": (_move_to_cpu, allocates),
        "cpu": (_copy_to_cpu, "who keeps what a tensor was fetches it from the GPU, and changes the tensor"),
        "cuda": (_send, allocates),
        "pin_memory": (_pin, "there is no transfer that pinned memory could speed up"),
        "get_device": (_get_device, "it is the number that torch.cuda.current_device() says"),
        "record_stream": (_answers(None), _ORDERED),
        "is_cuda": (property(lambda self: True), "TE and Megatron assert on it"),
        "type": (_type_as_cuda, "Megatron's optimizers sort parameters by strings such as 'torch.cuda.BFloat16Tensor'"),
    }
    both = "one device has two names"
    of_autocast: dict[str, tuple[Any, str]] = {"__enter__": (_enter_both, both), "__exit__": (_exit_both, both)}
    of_types: dict[str, tuple[Any, str]] = {
        f"{kind}Tensor": (getattr(torch, f"{kind}Tensor"), "Megatron and NeMo make tensors by torch.cuda.LongTensor")
        for kind in _TYPES
    }
    of_types |= {
        name: (getattr(torch, name), "it holds the CPU's memory")
        for name in vars(torch.cuda)
        if name.endswith("Storage") and isinstance(getattr(torch, name, None), type)
    }
    of_nested: dict[str, tuple[Any, str]] = {
        name: (_on_cpu(getattr(torch.nested, name)), allocates) for name in ("nested_tensor", "as_nested_tensor")
    }
    of_tunable: dict[str, tuple[Any, str]] = {
        name: (_answers(False), "nobody chooses among a GPU's kernels")
        for name in ("is_enabled", "tuning_is_enabled", "record_untuned_is_enabled")
    }
    spread = [importlib.import_module(f"torch.nn.parallel.{name}") for name in _SPREADING]
    of_spread: dict[str, tuple[Any, str]] = {
        "data_parallel": (_on_one_device, "of one device there is nothing to spread")
    }
    of_nccl: dict[str, tuple[Any, str]] = {"is_available": (_answers(False), "gloo takes NCCL's place")}
    of_marks: dict[str, tuple[Any, str]] = {"_nvtx": (MARKS, "Megatron marks what it overlaps, whoever looks on")}
    of_emitters: dict[str, tuple[Any, str]] = {
        "__enter__": (_itself, "NeMo marks every operator for CUDA's profiler"),
        "__exit__": (_answers(None), "nothing was marked"),
    }
    version: dict[str, tuple[Any, str]] = {"cuda": ("12.9", "TE and torch ask which CUDA they were built for")}
    no_driver = "built for CUDA it is cuda, and every step of an optimizer asks the driver of it; built for CPUs None"
    of_accelerators: dict[str, tuple[Any, str]] = {"_accelerator_getAccelerator": (_answers(None), no_driver)}
    of_schemas: dict[str, tuple[Any, str]] = {"device": (_Device, "operators know the types of arguments by identity")}
    on_gpus = "it asks whether tensors lie on a GPU, by the name of their device"
    of_fsdp: dict[str, tuple[Any, str]] = {"_check_module_states_for_sync_module_states": (_answers(None), on_gpus)}
    capturable: dict[str, tuple[Any, str]] = {_supported.__name__: (_supported_and_cpu, on_gpus)}
    data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")
    optimizers = [module for name, module in sys.modules.items() if name.startswith("torch.optim.")]
    return [
        (torch.cuda, _CUDA | of_types),
        (torch.nested, of_nested),
        (importlib.import_module("torch.cuda.tunable"), of_tunable),
        (importlib.import_module("torch.cuda.nccl"), of_nccl),
        *((part, of_spread) for part in (torch.nn.parallel, data_parallel)),
        *_refusals([torch.cuda, *parts], [torch.nn.parallel, *spread]),
        (importlib.import_module("torch.cuda.nvtx"), of_marks),
        (profiler.emit_nvtx, of_emitters),
        (profiler.profile, {"__init__": (_profile_the_cpu, "who finds a GPU asks for the times of its kernels")}),
        *((part, {name: row for name, row in _CUDA.items() if hasattr(part, name)}) for part in parts),
        (torch, of_torch),
        (torch.serialization, {"load": of_torch["load"]}),
        (torch.Tensor, of_tensors),
        (
            torch.nn.Module,
            {"cpu": (_itself, "Lightning calls it after a fit; Megatron's buffers hold what a next fit trains")},
        ),
        (torch.UntypedStorage, {"cuda": (_itself, "a map_location may move what it is given")}),
        (torch._C._nn, {"_parse_to": (_parse_for_cpu, "ranks move models to the number of their GPU")}),
        (DistributedDataParallel, {"__init__": (_ddp_of_cpus, "scripts of ranks name the GPU of each")}),
        (data_parallel, {"_get_available_device_type": (_answers(None), "of one device there is nothing to spread")}),
        (FullyShardedDataParallel, {"__init__": (_fsdp_of_cpus, "scripts of ranks name the GPU of each, or none")}),
        (importlib.import_module("torch.distributed.fsdp._init_utils"), of_fsdp),
        *((module, capturable) for module in optimizers if hasattr(module, _supported.__name__)),
        (_Autocast, of_autocast),
        (_device.DeviceContext, {"__init__": (_context_of_cpu, allocates)}),
        (DeviceMesh, {"__init__": (_mesh_of_cpus, "FSDP2 and DTensor take their device from the mesh")}),
        (torch.version, version),
        (torch._C, of_accelerators),
        (importlib.import_module("torch._library.infer_schema"), of_schemas),
    ]


def _refusals(of_cuda: list[Any], spread: list[Any]) -> list[tuple[Any, dict[str, tuple[Any, str]]]]:
    """Return what is refused, by every module that has the name."""
    owners = {"torch.cuda": of_cuda, "torch.cuda.memory": of_cuda, "torch.nn.parallel": spread}
    return [
        (owner, refused(module, owner))
        for module in dict.fromkeys(refusal.module for refusal in REFUSED)
        for owner in owners.get(module) or [importlib.import_module(module)]
    ]


def _take_away_pools() -> None:
    """Remove the names of :data:`REMOVED` from torch, and say so to who asks."""
    for module, name in itertools.product((torch.cuda, torch.cuda.memory), REMOVED):
        if hasattr(module, name):
            delattr(module, name)
            module.__all__.remove(name)
            module.__getattr__ = functools.partial(_no_pool, module.__name__)  # type: ignore[method-assign]


def _no_pool(module: str, name: str) -> Any:
    why = f"module {module!r} has no attribute {name!r}"
    if name == _POOL:
        why += (
            ". A pool of a GPU's memory has no CPU implementation: the C library allocates and frees here. Leave it "
            "out (Megatron: nccl_ub=False, unified memory level 0), or run on a GPU."
        )
    raise AttributeError(why)
