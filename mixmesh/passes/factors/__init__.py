"""Sufficient factors: weight gradients that every rank computes for itself from gathered factors (SFB)."""

from .apply import factorable, with_factors
from .choose import best_factors, cut_factors, most_saved_s, repeated_s, saved_s
from .cut import Product, cheapest_cut

__all__ = [
    "Product",
    "best_factors",
    "cheapest_cut",
    "cut_factors",
    "factorable",
    "most_saved_s",
    "repeated_s",
    "saved_s",
    "with_factors",
]
