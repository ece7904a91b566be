"""What can go wrong while a prompt runs."""


class InterruptProcessingException(BaseException):
    """Somebody asked the running prompt to stop. Not an Exception, so that nodes which catch everything let it pass."""


class DependencyCycleError(Exception):
    """Nodes wait for each other; ``node_id`` is the one to blame."""

    def __init__(self, node_id: str, cycle: list[str]):
        super().__init__(f"Nodes {', '.join(cycle)} wait for each other: remove one link of the loop.")
        self.node_id = node_id


class NodeInputError(Exception):
    """A node asked lazily for an input that is not a link."""


class NodeNotFoundError(Exception):
    """A node id that is neither in the prompt nor in one of its expansions, or a class that nobody registered."""


class PathError(ValueError):
    """A file name that leads out of its folder, or to no file."""


class NodeStopped(Exception):
    """Internal: node ``node_id`` raised ``__cause__``."""

    def __init__(self, node_id: str):
        super().__init__(node_id)
        self.node_id = node_id
