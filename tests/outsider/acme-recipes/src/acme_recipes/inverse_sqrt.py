def inverse_sqrt(config, /, *, total_steps):
    warmup = config.warmup_steps
    return lambda step: min(step / warmup, (warmup / step) ** 0.5)
