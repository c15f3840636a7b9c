"""Which passes a job needs and in which order: decided by what they declare, without torch."""
