"""Vision-language models: fusions, encoders, connectors, image data and evaluation."""
