"""Who is running: the host of this process, and the node whose code is being executed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from .host import EmbeddedHost


class ExecutionContext(NamedTuple):
    """The call of a node's function: ``list_index`` counts the calls of a node that is mapped over a list."""

    prompt_id: str
    node_id: str
    list_index: int | None


_executing: ContextVar[ExecutionContext | None] = ContextVar("executing", default=None)
_process: WeakValueDictionary[str, EmbeddedHost] = WeakValueDictionary()


def get_executing_context() -> ExecutionContext | None:
    """The node being executed, also after an await in an async node; None in handlers and in threads of one's own."""
    return _executing.get()


@contextmanager
def executing(prompt_id: str, node_id: str, list_index: int | None = None) -> Iterator[None]:
    token = _executing.set(ExecutionContext(prompt_id, node_id, list_index))
    try:
        yield
    finally:
        _executing.reset(token)


def make_current(host: EmbeddedHost) -> None:
    """A process has one current host, the one created or run last, which the accessors in this package speak of."""
    _process["host"] = host


def find_host() -> EmbeddedHost | None:
    return _process.get("host")


def current_host() -> EmbeddedHost:
    """The current host.

    Raises:
        LookupError: there is none.
    """
    host = find_host()
    if host is None:
        raise LookupError("This needs a running host: create an EmbeddedHost first.")
    return host


def interrupt() -> None:
    """Ask the running prompt to stop at its next check."""
    current_host().interrupt()


def throw_exception_if_processing_interrupted() -> None:
    """Raise InterruptProcessingException, once, if somebody asked the running prompt to stop."""
    host = find_host()
    if host is not None:
        host.throw_if_interrupted()
