"""CUDA's streams and events, and the marks of its profilers, where the CPU does one thing after the other.

A stream orders nothing, since everything is in order; an event is the moment at which it is recorded, and two of them
tell the time between. Marks are made for who looks on with CUDA's tools, of which there are none here.
"""

from __future__ import annotations

import time
import types

import torch


class Stream(torch.Stream):
    """A CUDA stream where there is nothing to order: the CPU does one thing after the other.

    It is one of torch's own, of the CPU, since torch's operators read a stream from its memory and look at no class.
    """

    device = torch.device("cpu")
    cuda_stream = 0
    priority = 0

    def __new__(cls, *args: object, **kwargs: object) -> Stream:
        return super().__new__(cls, stream_id=0, device_index=0, device_type=0)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None: ...


class Event(torch.Event):
    """A moment: whatever was asked for before it is done when it is recorded."""

    recorded: float | None = None

    def __new__(cls, *args: object, **kwargs: object) -> Event:
        return super().__new__(cls)

    def record(self, stream: object = None) -> None:
        self.recorded = time.perf_counter()

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Return the milliseconds from this moment to the other; raise ValueError if one was not recorded."""
        end = getattr(end_event, "recorded", None)
        if self.recorded is None or end is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return float(1e3 * (end - self.recorded))


class Chosen:
    """``torch.cuda.device`` as a context: there is one device, and it is chosen. A class, which torch asks about."""

    def __init__(self, device: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


class _Code(int):
    """What CUDA's runtime returns: a number, 0 where nothing went wrong."""

    success = 0


def _nothing(*args: object) -> int:
    return 0


CUDART = types.SimpleNamespace(
    cudaProfilerStart=_nothing,
    cudaProfilerStop=_nothing,
    cudaError=_Code,
    cudaGetErrorString=lambda code: "an error of CUDA's, which no CPU has told",
)
"""``torch.cuda.cudart()``, of which programs ask when to profile, and what a number means."""

MARKS = types.SimpleNamespace(
    **dict.fromkeys(
        ("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA", "deviceRangeStart", "deviceRangeEnd"), _nothing
    )
)
"""What ``torch.cuda.nvtx`` calls."""
