"""``demo``: a tiny random model, made once, runs the shipped text-to-video workflow."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from .make_checkpoint import make_checkpoint
from .presets import tiny
from .report import Report
from .run import RunOptions, load_workflow, run_workflow

WORKFLOW = Path(__file__).parent.parent / "example_workflows" / "text_to_video_small_api.json"
MODEL_VERSION = "tiny-1"  # changes with the files that are written, so that old ones are not used


def run_demo(options: RunOptions) -> Report:
    """Make the model if it is not there, and run the workflow with it."""
    return run_workflow(load_workflow(WORKFLOW), replace(options, models=[demo_models()]))


def demo_models() -> Path:
    """The folder with the tiny model; another process that makes it at the same time does no harm."""
    folder = cache_folder() / MODEL_VERSION
    if not folder.is_dir():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        try:
            make_checkpoint(unfinished, tiny())
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def cache_folder() -> Path:
    """Where this user's caches go, by the custom of the system."""
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "lazy-h3"
