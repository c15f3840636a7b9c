"""A decoder all of whose layers are linear, as Hugging Face would have it."""

from typing import Any, ClassVar

from forge_plugins_dense.weight_layouts import RelativeLayout


class LinearLayout(RelativeLayout):
    architectures = ("AcmeLinearForCausalLM",)
    model_type = "acme_linear"
    inside: ClassVar[dict[str, str]] = {**RelativeLayout.inside, "attention.gate": "self_attn.g_proj"}

    def modules(self, config):
        return super().modules(config) | {"attention.gate"}

    def read(self, hf) -> dict[str, Any]:
        mixer = {"name": "acme-mixers:gated_linear", "memory": hf["memory"]}
        return super().read(hf) | {"mixer": mixer, "n_kv_heads": None}

    def write(self, config, vocab_size):
        memory = getattr(config.mixer and config.mixer.config, "memory", None)
        return super().write(config, vocab_size) | {"memory": memory}
