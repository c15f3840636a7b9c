"""Ranks: how they find each other, agree, notice that one has gone, and end together."""
