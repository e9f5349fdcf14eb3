"""Compiled runs: many steps of a method as one call, for ``solve(..., compile=True)``.

A step on a small problem spends nearly all of its time in Python and in the calls of single operations. Here it is traced once
into a graph of tensor operations, gradients included; copies of the graph in a row are compiled by torch's inductor, and on a
GPU recorded as a CUDA graph. Steps on modules are recorded without the compiler. What is traced or recorded is the method's
own ``step``.

The step number enters a step through its numbers alone (``at.alpha``, ``at.c``), so that these are inputs of the graph. A
method or an objective that decides in Python from the values of tensors cannot be traced, and runs step by step.
"""

from meha.running.compiled.pace import CompiledPace, CompileWarning, Recorded
from meha.running.compiled.steppers import Eager, Stepper, TracingError
from meha.running.compiled.traced import Traced

__all__ = ["CompileWarning", "CompiledPace", "Eager", "Recorded", "Stepper", "Traced", "TracingError"]
