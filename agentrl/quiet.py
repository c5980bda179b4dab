"""Libraries' own progress bars and notes, which would garble the display."""

from __future__ import annotations

import logging
import threading
import warnings

from agentrl.errors import FULL

log = logging.getLogger(__name__)
_plain_hook = threading.excepthook


def quiet_libraries() -> None:
    """Silence the progress bars of transformers and of the hub's library, a note that torch writes about each traced graph, and
    its warning that a checkpoint of one process is saved by one process."""
    import transformers
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    transformers.utils.logging.disable_progress_bar()
    disable_progress_bars()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    threading.excepthook = _thread_failed


def _thread_failed(args: threading.ExceptHookArgs, /) -> None:
    """A library's writing thread (TensorBoard's) on a full disk: a line in the log; the run itself says that it is full."""
    if isinstance(args.exc_value, OSError) and args.exc_value.errno in FULL:
        log.warning("%s: %s", args.thread.name if args.thread else "a thread", args.exc_value)
    else:
        _plain_hook(args)
