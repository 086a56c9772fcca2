"""Rewrites of programs and steps: order, reductions of gradients, ZeRO, rematerialisation."""
