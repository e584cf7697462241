"""Gradient harmonizing, and what the paper compares it with. Needs torch alone."""

from ghmdet.losses import functional
from ghmdet.losses.harmonized import GHMC, GHMR, Harmonizer, SoftmaxGHMC

__all__ = ["GHMC", "GHMR", "Harmonizer", "SoftmaxGHMC", "functional"]
