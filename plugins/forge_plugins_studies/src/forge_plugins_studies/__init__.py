"""Studies: many runs that differ by a setting."""
