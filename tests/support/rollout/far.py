"""A device that no kernel of a CPU can reach, on any machine: what a push does with a GPU, but for its kernels.

Its tensors hold another one and run torch's operations on that. As those of a GPU, they are of another device, have
addresses that lead nowhere in this process, take no operation together with a tensor of the CPU but a copy, and are
read by ``cpu()``, ``item()`` and ``tolist()`` alone.
"""

import functools

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NOWHERE = 1 << 62
"""What is added to addresses. To read there ends the process, as an address of a GPU does."""
BETWEEN = {"aten::copy_", "aten::_to_copy"}
"""Operations that take tensors of two devices."""


class Far(torch.Tensor):
    """A tensor there; ``inner`` is where its values are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device(),
        )

    def __init__(self, inner):
        self.inner = inner

    def data_ptr(self):
        return self.inner.data_ptr() + NOWHERE

    def tolist(self):
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name
        to = kwargs.get("device")
        if name == "aten::copy_":
            RUNTIME.see(args[1])
        if name not in BETWEEN:
            _one_device(name, [*args, *kwargs.values()])
        inside, named = tree_map_only(Far, lambda t: t.inner, (args, kwargs))
        if to is not None:
            named["device"] = "cpu"
        made = func(*inside, **named)
        if func._schema.is_mutable:
            return args[0]
        back = to is not None and torch.device(to).type == "cpu"
        return made if back else tree_map_only(torch.Tensor, Far, made)


class Runtime(_DummyBackendModule):
    """What ``torch.cuda`` is to a GPU."""

    waits = 0
    largest = 0
    """The bytes of the largest tensor that was brought there."""

    def see(self, brought):
        if not isinstance(brought, Far):
            self.largest = max(self.largest, brought.nbytes)

    def synchronize(self):
        self.waits += 1


RUNTIME = Runtime()


def _one_device(name, arguments):
    flat = [t for one in arguments for t in (one if isinstance(one, (list, tuple)) else [one])]
    if any(type(t) is not Far and isinstance(t, torch.Tensor) and t.dim() for t in flat):
        raise RuntimeError(f"{name}: Expected all tensors to be on the same device, and here are two.")


def _inner(tensor):
    return tensor.inner if isinstance(tensor, Far) else tensor


def _empty(size, dtype=None, **_):
    return Far(torch.empty(size, dtype=dtype))


def _empty_strided(size, stride, dtype=None, **_):
    return Far(torch.empty_strided(size, stride, dtype=dtype))


def _copied(x, to, non_blocking=False):
    RUNTIME.see(x)
    _inner(to).copy_(_inner(x))
    return to


@functools.cache
def device():
    """The device, which torch knows from the first call on, and takes for the machine's accelerator."""
    _setup_privateuseone_for_python_backend("far", RUNTIME)
    library = torch.library.Library("aten", "IMPL")
    for name, made in (("empty.memory_format", _empty), ("empty_strided", _empty_strided), ("_copy_from", _copied)):
        library.impl(name, made, "PrivateUse1")
    device.library = library  # it ends with the object
    return torch.device("far", 0)


def moved(model):
    """The model, with what a checkpoint has of it there; tied parameters stay tied. Models of vLLM share the others,
    such as tables of rotations."""
    twins = {}
    for layer in model.modules():
        for held in (layer._parameters, layer._buffers):
            for name, one in held.items():
                if one is not None and not isinstance(one, Far) and name not in layer._non_persistent_buffers_set:
                    held[name] = twins.setdefault(one, _twin(one))
    return model


def _twin(one):
    if not isinstance(one, torch.nn.Parameter):
        return Far(one)
    made = torch.nn.Parameter(Far(one.data), requires_grad=False)
    for name, value in vars(one).items():  # its loader, and what else vLLM keeps there
        setattr(made, name, value)
    return made


def brought_back(tensors):
    """Tensors of a model as they lie there, by name."""
    return {name: _inner(one) for name, one in tensors.items()}
