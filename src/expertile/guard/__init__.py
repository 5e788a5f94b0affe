"""The guard: once sealed, a Triton or Gluon kernel that would be compiled is an event that names the argument to blame.

Importing it imports neither torch nor triton; `seal` and `warm` import Triton when they are called.
"""

from .declarations import Variant
from .events import Difference, Event
from .sealing import Guard, seal, unseal
from .warmup import Warmed, warm
from .watching import ready

__all__ = ["Difference", "Event", "Guard", "Variant", "Warmed", "ready", "seal", "unseal", "warm"]
