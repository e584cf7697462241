"""ghmdet: training object detectors when almost every example is easy and a few are wrong.

The names below load on first use, so that `import ghmdet` costs nothing and the losses need torch alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ghmdet import functional, losses
    from ghmdet.losses import GHMC, GHMR, Harmonizer, SoftmaxGHMC

__version__ = "0.1.0"
__all__ = ["GHMC", "GHMR", "Harmonizer", "SoftmaxGHMC", "functional", "losses"]

_HOME = {
    "GHMC": "ghmdet.losses",
    "GHMR": "ghmdet.losses",
    "Harmonizer": "ghmdet.losses",
    "SoftmaxGHMC": "ghmdet.losses",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in __all__:
        return importlib.import_module(f"ghmdet.{name}")
    raise AttributeError(f"module 'ghmdet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
