"""Searches for programs, placements and shares."""
