"""VF-iDCA: a sequence of convex programs on the value function of a lower level with radii."""

from meha.methods.vfidca.method import VFiDCA, VFiDCAState

__all__ = ["VFiDCA", "VFiDCAState"]
