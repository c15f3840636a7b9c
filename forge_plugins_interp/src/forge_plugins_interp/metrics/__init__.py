"""How alike two representations of the same stimuli are. All compute in float64, with rows as stimuli."""
