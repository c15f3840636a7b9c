"""Vision-language models as Hugging Face has them, for forge-plugins-hf."""
