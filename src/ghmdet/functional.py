"""`ghmdet.functional`: the paper's mathematics as pure functions."""

from ghmdet.losses.functional import (
    asl1_loss,
    ghmc_loss,
    ghmr_loss,
    gradient_density,
    harmonize,
    region_counts,
    softmax_ghmc_loss,
)

__all__ = ["asl1_loss", "ghmc_loss", "ghmr_loss", "gradient_density", "harmonize", "region_counts", "softmax_ghmc_loss"]
