import torch


def plain_adamw(config, /, *, parameters):
    return torch.optim.AdamW([entry.parameter for entry in parameters], lr=config.lr, fused=False, foreach=False)
