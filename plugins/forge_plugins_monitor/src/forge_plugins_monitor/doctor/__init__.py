"""``forge doctor``, and what it looks at, one file a subject."""
