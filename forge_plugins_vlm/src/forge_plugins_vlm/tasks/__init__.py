"""Image tasks that are drawn: what a model that looks at its images learns in minutes."""
