"""A small model of a CUDA device, whose streams run late and out of step with each other.

Tensors have contents, and lie in memory of the host. Triton's interpreter runs kernels. Work on the
device waits in the queue of its stream. At any time, the queues run some of it, in an order that a
test chooses. Memory is reused as early as torch's allocators reuse it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.interpreter import InterpretedFunction

from batchinfer.kernels import launch as launch_settings

_POISON = 0xAB  # contents of new memory
_MOVES = frozenset({"to", "_to_copy"})
_READS = frozenset({"_local_scalar_dense", "equal", "item"})
_DEVICE = torch.device("cuda:0")


class Event:
    """A point in the queue of a stream."""

    device: LateCuda  # set by ``LateCuda.active``

    def __init__(self, *_: Any, **__: Any) -> None:
        self.done = True  # an event that is not recorded counts as reached

    def record(self, stream: Stream | None = None) -> None:
        """Queue the event."""
        self.done = False
        (stream or self.device.current).queue(lambda: setattr(self, "done", True))

    def query(self) -> bool:
        """Return true if the stream has reached the event."""
        return self.done

    def synchronize(self) -> None:
        """Run queues until the stream reaches the event."""
        self.device.run_until(lambda: self.done)


@dataclass(frozen=True)
class _Task:
    """Work in a queue. It runs only when ``after`` is done."""

    run: Callable[[], Any]
    blocks: tuple[_Block, ...] = ()
    after: Event | None = None


class Stream:
    """A queue of work."""

    device: LateCuda  # set by ``LateCuda.active``

    def __init__(self, *_: Any, **__: Any) -> None:
        self._tasks: deque[_Task] = deque()
        self.device.streams.append(self)

    def queue(
        self,
        run: Callable[[], Any],
        blocks: tuple[_Block, ...] = (),
        after: Event | None = None,
    ) -> None:
        """Queue work on blocks of memory, then let the device run some work of any stream."""
        for block in blocks:
            block.num_tasks += 1
        self._tasks.append(_Task(run, blocks, after))
        self.device.run_some()

    @property
    def is_idle(self) -> bool:
        """True if the queue is empty."""
        return not self._tasks

    @property
    def can_run(self) -> bool:
        """True if the first task waits for nothing."""
        if not self._tasks:
            return False
        after = self._tasks[0].after
        return after is None or after.done

    def run_next(self) -> None:
        """Run the first task."""
        task = self._tasks.popleft()
        with _disable_current_modes():
            task.run()
        for block in task.blocks:
            block.num_tasks -= 1

    def wait_event(self, event: Event) -> None:
        """Let later work of this stream wait for an event."""
        self.queue(lambda: None, after=event)

    def wait_stream(self, other: Stream) -> None:
        """Let later work of this stream wait for the present work of another stream."""
        event = Event()
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        """Run queues until this one is empty."""
        self.device.run_until(lambda: self.is_idle)


@dataclass(eq=False)
class _Block:
    """An allocation of pinned memory (``stream`` is None) or of the device."""

    contents: torch.Tensor  # uint8
    stream: Stream | None
    num_tasks: int = 0  # queued tasks that use the block
    is_free: bool = False


@dataclass(eq=False)
class _Memory:
    """Blocks of pinned memory and of the device."""

    waits_for_copies: bool = True
    """False: pinned memory is reused while copies from and to it are queued."""
    blocks: dict[int, _Block] = field(default_factory=dict)

    def empty(self, shape: Any, dtype: torch.dtype, stream: Stream | None) -> torch.Tensor:
        """Return memory for a tensor. It is reused when the tensor and its views are gone: on the
        device by the same stream, at once; pinned memory when no queued work uses it."""
        size = max(1, int(np.prod(shape)) * dtype.itemsize)
        block = next((b for b in self.blocks.values() if self._is_usable(b, size, stream)), None)
        if block is None:
            block = _Block(torch.full((size,), _POISON, dtype=torch.uint8), stream)
            self.blocks[block.contents.data_ptr()] = block
        block.is_free = False
        # torch keeps this array as long as a tensor uses its memory.
        array = block.contents.numpy()[:size]
        weakref.finalize(array, setattr, block, "is_free", True)
        count = int(np.prod(shape))
        return torch.from_numpy(array)[: count * dtype.itemsize].view(dtype).view(tuple(shape))

    def block_of(self, tensor: torch.Tensor) -> _Block | None:
        return self.blocks.get(tensor.untyped_storage().data_ptr())

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        block = self.block_of(tensor)
        return block is not None and block.stream is not None

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        block = self.block_of(tensor)
        return block is not None and block.stream is None

    def for_later(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor at the same place, which does not keep the memory from being reused. A
        copy stands in for pageable memory, which CUDA reads before the call returns."""
        block = self.block_of(tensor)
        if block is None:
            return tensor.clone()
        whole = block.contents[: len(block.contents) // tensor.itemsize * tensor.itemsize]
        whole = whole.view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _is_usable(self, block: _Block, size: int, stream: Stream | None) -> bool:
        if not block.is_free or len(block.contents) != size or block.stream is not stream:
            return False
        return stream is not None or block.num_tasks == 0 or not self.waits_for_copies


class LateCuda(TorchDispatchMode):
    """A CUDA device whose streams run late.

    Args:
        random: chooses which streams run, and when.
    """

    def __init__(self, random: Random) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = _DEVICE
        self.streams: list[Stream] = []
        self.memory = _Memory()
        self.current: Stream
        self._random = random
        self._runs_task = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace ``torch.cuda`` inside the ``with`` block."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Stream, "device", self, raising=False)
            patch.setattr(Event, "device", self, raising=False)
            self.current = Stream()
            for name, value in {
                "Stream": Stream,
                "Event": Event,
                "stream": self._using,
                "current_stream": lambda *_: self.current,
                "get_device_properties": lambda _: SimpleNamespace(multi_processor_count=1),
                "_lazy_init": lambda: None,
            }.items():
                patch.setattr(torch.cuda, name, value)
            patch.setattr(InterpretedFunction, "run", self._queueing(InterpretedFunction.run))
            patch.setattr(torch, "empty", self._with_pinned(torch.empty))
            patch.setattr(torch.Tensor, "is_pinned", self.memory.is_pinned)
            is_on_device, host = self._seems_on_device, torch.device("cpu")
            patch.setattr(torch.Tensor, "is_cuda", property(is_on_device))
            device_of = property(lambda tensor: _DEVICE if is_on_device(tensor) else host)
            patch.setattr(torch.Tensor, "device", device_of)
            launch_settings.num_multiprocessors.cache_clear()
            with self:
                yield
            launch_settings.num_multiprocessors.cache_clear()

    def run_some(self) -> None:
        """Run a few tasks, or none."""
        while self._random.random() < 0.4 and self._run_one():
            pass

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        """Run tasks until a condition holds."""
        while not is_reached():
            assert self._run_one(), "the streams wait for each other"

    def _run_one(self) -> bool:
        streams = [stream for stream in self.streams if stream.can_run]
        if streams:
            self._runs_task = True
            try:
                self._random.choice(streams).run_next()
            finally:
                self._runs_task = False
        return bool(streams)

    def _seems_on_device(self, tensor: torch.Tensor) -> bool:
        """Return true if a tensor is on the device. The interpreter sees only the host."""
        return not self._runs_task and self.memory.is_on_device(tensor)

    @contextmanager
    def _using(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _with_pinned(self, empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty_or_pinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            if not pin_memory:
                return empty(*size, **options)
            shape = size[0] if isinstance(size[0], tuple | list | torch.Size) else size
            with _disable_current_modes():
                return self.memory.empty(shape, options.get("dtype", torch.float32), None)

        return empty_or_pinned

    def _queueing(self, run: Callable[..., None]) -> Callable[..., None]:
        """Return a function that queues the launch of a Triton kernel."""

        def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            start = partial(run, kernel, grid=grid, warmup=warmup)
            if any(map(self.memory.is_on_device, _tensors((args, options)))):
                self._queue(start, args, options)
            else:
                start(*args, **options)

        return launch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        tensors = _tensors((args, kwargs))
        on_device = any(map(self.memory.is_on_device, tensors))
        to_device = any(
            isinstance(value, torch.device) and value.type == "cuda"
            for value in (*args, *kwargs.values())
        )
        if not (on_device or to_device):
            return func(*args, **kwargs)
        if func.is_view and name not in _MOVES:
            viewed = func(*args, **kwargs)
            if all(map(self.memory.is_on_device, _tensors(viewed))):  # not copied by ``contiguous``
                return viewed
        if name in _READS or (name in _MOVES and not to_device and "device" in kwargs):
            self.current.synchronize()
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            changed = kwargs.get("out", args[0])
            assert self.memory.block_of(changed), f"{name} writes to pageable memory"
            self._queue(func, args, kwargs)
            return changed
        kwargs.pop("device", None)
        if name in _MOVES and to_device:
            func, args, kwargs = torch.ops.aten.clone.default, args[:1], {}
        shaped = tree_map_only(torch.Tensor, _without_contents, (args, kwargs))
        result = func(*shaped[0], **shaped[1], **({} if tensors else {"device": "meta"}))
        out = tree_map_only(torch.Tensor, self._allocated, result)
        if name not in ("empty", "new_empty", "empty_like"):
            self._queue(func, args, kwargs, out)
        return out

    def _allocated(self, shaped: torch.Tensor) -> torch.Tensor:
        return self.memory.empty(shaped.shape, shaped.dtype, self.current)

    def _queue(self, func: Any, args: Any, kwargs: Any, out: Any = ()) -> None:
        """Queue an operation, whose result is written to ``out``: a tensor, or several."""
        everything = args, kwargs, out
        later_args, later_kwargs, later_out = tree_map_only(
            torch.Tensor, self.memory.for_later, everything
        )

        def run() -> None:
            result = func(*later_args, **later_kwargs)
            for target, computed in zip(*map(_tensors, (later_out, result)), strict=False):
                target.copy_(computed)

        used = map(self.memory.block_of, _tensors(everything))
        self.current.queue(run, tuple(block for block in used if block is not None))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _without_contents(tensor: torch.Tensor) -> torch.Tensor:
    options: Any = {"dtype": tensor.dtype, "device": "meta"}
    return torch.empty_strided(tensor.shape, tensor.stride(), **options)
