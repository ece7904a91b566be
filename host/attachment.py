"""Where the pack meets a running prompt: attached by the first of our nodes that is touched, gone with the prompt.

Nothing of the host is replaced. A progress handler, which the host calls for every node of every pack, gives start and finish
events; a sleeping task on the prompt's own event loop, which the host cancels however the prompt ends, gives the end.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections.abc import Callable, Set
from typing import Any

from ..memory.graph import Key
from ..memory.resource import Resource
from ..memory.session import Keeps, Session
from ..memory.store import Store
from .interface import Host
from .prompt import RunningPrompt
from .snapshot import summary_line

log = logging.getLogger("lazy_h3")

HANDLER_NAME = "lazy_h3"


class Attachment:
    """Keeps at most one session open: that of the running prompt. ``take_turns``: whether heavy nodes wait for each other."""

    def __init__(self, host: Host, store: Store, keeps: Keeps = lambda _: None, take_turns: bool = True) -> None:
        self.host = host
        self.store = store
        self.keeps = keeps
        self.take_turns = take_turns
        self.is_summed_up = True  # with a line of log at the end of each prompt
        self.predicted_peak: Callable[[], int | None] = lambda: None  # bytes of weights, as planned for the prompt
        self.followed: Callable[[], Set[Key]] = frozenset  # keys of loaders that are not ours, whose objects are resources
        self.after_node: list[Callable[[Session], None]] = []  # told when a node has finished and what it used last is released
        self.session: Session | None = None
        self._prompt: RunningPrompt | None = None
        self._finishing: str | None = None
        self._sentinels: set[asyncio.Task[None]] = set()  # event loops refer to their tasks weakly
        store.on_use.append(lambda _: self.touch())
        store.before_fill.append(self._about_to_fill)
        store.ledger.current_node = self._current_node

    def touch(self) -> Session | None:
        """Make sure that a session follows the running prompt. Called first thing by every node; cheap and idempotent."""
        registry = self.host.progress_module.get_progress_state()
        if not registry.prompt_id:
            return None
        if HANDLER_NAME in registry.handlers:
            return self.session
        self.close()
        self._turn_page(registry.prompt_id)
        self._prompt = RunningPrompt(registry, self.host, self.followed)
        self.session = Session(self._prompt, self.store, self.keeps, self.take_turns)
        registry.register_handler(_handler(self.host.progress_module.ProgressHandler, self))
        self._post_sentinel(self.session)
        self.session.begin()
        return self.session

    async def turn(self) -> None:
        """First thing in a heavy node: waits until it may compute, so that branches of the graph share one load of each model."""
        session, executing = self.touch(), self.host.executing()
        if session is not None and executing is not None:
            await session.turn(executing[1], self.host.raise_if_interrupted)

    def started(self, node: str) -> None:
        """The host begins a node."""
        if self.session is not None and self._prompt is not None:
            self._prompt.started(node)
            self.session.started(node)

    def finished(self, node: str) -> None:
        """The host has finished a node; what is released now is released after it."""
        if self.session is not None and self._prompt is not None:
            self._finishing = node
            self._prompt.finished(node)
            self.session.ended(node)
            self._tell_followers(self.session)
            self._finishing = None

    def close(self) -> None:
        """End the open session, if there is one."""
        session = self.session
        if session is not None and not session.is_over:
            session.end()
            if self.is_summed_up:
                self._sum_up()
        self.session = self._prompt = None

    def origins(self, name: str) -> tuple[Key, ...]:
        """Keys of the loaders that the object at this input of the executing node may be from."""
        executing = self.host.executing()
        return () if executing is None or self._prompt is None else self._prompt.origins(executing[1], name)

    @property
    def prompt_id(self) -> str | None:
        """The running prompt, if one of our nodes was touched in it."""
        return None if self.session is None else self.session.prompt_id

    def is_idle(self) -> bool:
        """Whether no prompt runs, as far as the host tells."""
        return self.session is None and self.host.outputs_to_execute() is None

    def _tell_followers(self, session: Session) -> None:
        for follower in self.after_node:
            try:
                follower(session)
            except Exception:  # in an event of the host it would kill the worker thread
                log.exception("Lazy H3: what follows the nodes of prompt %s failed.", session.prompt_id)

    def _about_to_fill(self, resource: Resource, nbytes: int) -> None:
        if self.session is not None:
            self.session.about_to_fill(resource, nbytes)

    def _turn_page(self, prompt_id: str) -> None:
        before = {resource.name: resource.live_bytes() for resource in self.store.resident()}
        self.store.ledger.turn_page(prompt_id, before)

    def _sum_up(self) -> None:
        try:
            log.info("%s", summary_line(self.store.ledger.page(), self.predicted_peak()))
        except Exception:  # a host's reset() may have called, and would die of it
            log.exception("Lazy H3: the summary of the prompt could not be made.")

    def _post_sentinel(self, session: Session) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a foreign executor: the session ends at reset() or at the next touch()
            return
        task = loop.create_task(_sleep_until_cancelled(), name="lazy-h3-sentinel")
        self._sentinels.add(task)
        task.add_done_callback(self._sentinels.discard)
        outside = contextvars.Context()  # in the present one, the node that is executing now would seem to end the prompt
        task.add_done_callback(lambda _: self.close() if self.session is session else session.end(), context=outside)

    def _current_node(self) -> str | None:
        executing = self.host.executing()
        return executing[1] if executing else self._finishing


async def _sleep_until_cancelled() -> None:
    await asyncio.Event().wait()


def _handler(base: type, attachment: Attachment) -> Any:
    """A progress handler for the open session."""
    handler = _handler_class(base)(HANDLER_NAME)
    handler.attachment = attachment
    return handler


@functools.lru_cache(maxsize=4)
def _handler_class(base: type) -> type:
    class SessionHandler(base):  # type: ignore[misc, valid-type]
        """Passes the host's events on. Never raises: sessions contain their own errors."""

        attachment: Attachment

        def start_handler(self, node_id: str, state: Any, prompt_id: str) -> None:
            self.attachment.started(node_id)

        def finish_handler(self, node_id: str, state: Any, prompt_id: str) -> None:
            self.attachment.finished(node_id)

        def update_handler(self, *_: Any, **__: Any) -> None:
            """Progress inside a node is no event of ours."""

        def reset(self) -> None:
            self.attachment.close()

    return SessionHandler
