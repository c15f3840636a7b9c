"""Which values of a clean prompt bring its answer back into a corrupt one."""
