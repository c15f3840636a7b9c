"""Two passes around activation checkpointing. Neither knows what a block is made of."""

from torch.autograd.graph import save_on_cpu
from torch.profiler import record_function


class LabelBlocks:
    """A range of the profiler around each forward of a block."""

    def __init__(self, config, /, **_):
        pass

    def apply(self, model, context):
        touched = [f"blocks.{key}" for key in model.blocks]
        for name, block in zip(touched, model.blocks.values(), strict=True):
            around(block, lambda name=name: record_function(name))
        return model, touched


class OffloadInputs:
    """On CUDA, pinned and copied while the GPU computes; elsewhere there is no other memory to go to."""

    def __init__(self, config, /, **_):
        self.every = config.every

    def apply(self, model, context):
        pinned = context.device.type == "cuda"
        chosen = list(model.blocks)[:: self.every]
        for key in chosen:
            around(model.blocks[key], lambda: save_on_cpu(pin_memory=pinned))
        return model, [f"blocks.{key}" for key in chosen]


def around(block, make_context):
    """Run each forward of ``block`` inside of a context of its own, left also if forward is broken off."""
    entered = []

    def enter(*_):
        entered.append(make_context())
        entered[-1].__enter__()

    block.register_forward_pre_hook(enter)
    block.register_forward_hook(lambda *_: entered.pop().__exit__(None, None, None), always_call=True)
