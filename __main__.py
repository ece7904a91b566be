"""``python -m lazy_h3``: the same as the console script."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
