"""Continuation: the default method for tensors, by quasi-Newton steps on a penalty that grows in stages."""

from meha.methods.continuation.method import Continuation, ContinuationState

__all__ = ["Continuation", "ContinuationState"]
