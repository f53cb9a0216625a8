"""Which order does this engine use? Evidence, not belief.

Three independent witnesses, one verdict. Comments are no evidence; "cannot tell" is an answer;
witnesses that disagree are an error that shows both.

* **source** (``tree``, ``source``, ``python_source``, ``c_source``): the engine's code, installed,
  in a wheel or in a folder, followed in its syntax tree from the entry to the store.
* **live buffer** (``live``, ``sglang``): marked rows, written by the engine's own writer.
* **numbers** (``numeric``): the reading of the cache that alone reproduces captured outputs.

In a terminal::

    python -m mla_kernels.evidence sglang              # or vllm; the one installed here
    python -m mla_kernels.evidence sglang --wheel FILE
    python -m mla_kernels.evidence --path FOLDER       # any source tree, Python or C++
    python -m mla_kernels.evidence --captured FILE     # q, rows and out of one call

and for a pool in a running process, ``evidence_for(pool)`` is its ``KVLayout``.

The files, each importing only from those before it: ``verdict``, ``symbols``, ``tree``,
``python_source``, ``c_source``, ``source``, ``live``, ``numeric``, ``sglang``, ``engines``.
"""

from .live import order_of_buffer, order_of_scaled_buffer, order_of_value
from .numeric import compare
from .sglang import evidence_for, sglang_finding, verdict_for
from .verdict import OrderUnknown, Testimony, Verdict, WitnessesDisagree, judge

__all__ = [
    "OrderUnknown", "Testimony", "Verdict", "WitnessesDisagree", "compare", "evidence_for", "judge",
    "order_of_buffer", "order_of_scaled_buffer", "order_of_value", "sglang_finding",
    "verdict_for",
]
