"""Steps that only wait, for an event or for a time: they take neither a worker each nor a CPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from verl_workflow.workflow._options import hosted_options

Event = Any


class EventListener:
    """Waits for an event of a kind. Made anew, without arguments, for each call; keep nothing in it.

    It runs in a process that all waiting steps of a job share, on one event loop: `await` what takes time, and never
    block.
    """

    async def poll_for_event(self, *args: Any, **kwargs: Any) -> Event:
        """Return when the event is there. After a crash it is asked again, so an event must not be used up by it."""
        raise NotImplementedError

    async def event_checkpointed(self, event: Event) -> None:
        """Called when the event is written down, at least once: the time to tell its source."""


class TimerListener(EventListener):
    """Gives None when a time has come, in seconds since 1970."""

    async def poll_for_event(self, timestamp: float) -> Event:
        while (left := timestamp - time.time()) > 0:
            # In pieces: the clock of the wall may be set meanwhile.
            await asyncio.sleep(min(left, 60.0))


def wait_for_event(event_listener_type: type[EventListener], *args: Any, **kwargs: Any) -> Any:
    """A step whose value is an event.

    Two steps of the workflow: one polls, and its event is written down; then the other tells the listener so. The
    event is committed exactly once; `event_checkpointed` is called at least once.

    Args:
        args, kwargs: for `poll_for_event`; may hold other steps.

    Raises:
        TypeError: the class is no `EventListener`.
    """
    if not (isinstance(event_listener_type, type) and issubclass(event_listener_type, EventListener)):
        name = getattr(event_listener_type, "__name__", repr(event_listener_type))
        raise TypeError(f"Event listener type is {name}, which is not a subclass of workflow.EventListener")
    apart = not event_listener_type.__module__.startswith("verl_workflow.")
    event = _hosted(get_message, apart=apart).bind(event_listener_type, *args, **kwargs)
    return _hosted(message_committed, apart=apart).bind(event_listener_type, event)


def sleep(duration: float) -> Any:
    """A step that ends, with None, so many seconds after it has begun; a crash does not make it longer."""
    return wait_for_event(TimerListener, _hosted(wake_time, apart=False).bind(duration))


def get_message(event_listener_type: type[EventListener], *args: Any, **kwargs: Any) -> Awaitable[Event]:
    return event_listener_type().poll_for_event(*args, **kwargs)


async def message_committed(event_listener_type: type[EventListener], event: Event) -> Event:
    await event_listener_type().event_checkpointed(event)
    return event


async def wake_time(duration: float) -> float:
    return time.time() + duration


def _hosted(function: Callable[..., Any], *, apart: bool) -> Any:
    import ray

    # Ray refuses coroutine functions as tasks; this one is never called by it.
    def waiting(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    waiting.__module__, waiting.__qualname__ = function.__module__, function.__qualname__
    return ray.remote(waiting).options(num_cpus=0, **hosted_options(f"workflow.{function.__name__}", apart=apart))
