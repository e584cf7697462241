"""Gradient harmonizing, and what the paper compares it with. Needs torch alone."""

from ghmdet.losses import functional
from ghmdet.losses.baselines import ASL1, OHEM, CrossEntropy, FocalLoss, SmoothL1, prior_bias
from ghmdet.losses.harmonized import GHMC, GHMR, Harmonizer, SoftmaxGHMC

__all__ = [
    "ASL1",
    "GHMC",
    "GHMR",
    "OHEM",
    "CrossEntropy",
    "FocalLoss",
    "Harmonizer",
    "SmoothL1",
    "SoftmaxGHMC",
    "functional",
    "prior_bias",
]
