"""Puts the pages of the documentation into the wheel, for ``forge docs``, and into the source distribution."""

import bz2
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ARCHIVE = "forge_plugins_monitor/pages/text.bz2"
LEFT_OUT = (
    *("architecture.md", "glossary.md", "hooks/public-modules.md", "promises.md", "scale.md"),
    *("compare-representations.md", "describe-a-cluster.md", "neural-recordings.md", "published-models.md"),
    *("describe-a-weight-layout.md", "moe-layouts.md", "sparse-autoencoders.md", "vlm-architectures.md"),
    *("how-to/log-captions.md", "how-to/study-optimizers.md", "image-data.md", "interventions.md", "walk.md"),
    *("look-into-a-model.md", "mixtures.md", "plan.md", "preference-tuning.md", "studies.md", "vision-language.md"),
    *("hooks/forge_activations.md", "hooks/forge_connectors.md", "hooks/forge_fusions.md"),
    *("hooks/forge_image_processors.md", "hooks/forge_norms.md", "hooks/forge_parallel_passes.md"),
    *("hooks/forge_representation_metrics.md", "hooks/forge_sequence_mixers.md", "hooks/forge_vision_encoders.md"),
    *("hooks/forge_models.md", "hooks/forge_supervisors.md", "hooks/forge_warm_starts.md"),
    *("hooks/forge_weight_layouts.md", "hooks/forge_phase_plans.md", "hooks/forge_observers.md", "command-line.md"),
    *("hooks/forge_checkpoint_mirrors.md", "hooks/forge_report_sections.md", "hooks/forge_run_columns.md"),
    *("hooks/forge_cluster_environments.md", "hooks/forge_kinds.md", "hooks/forge_parametrizations.md"),
    *("hooks/forge_checks.md", "hooks/forge_commands.md", "hooks/forge_tokenizers.md", "hooks/forge_weight_sources.md"),
    *("hooks/forge_evaluations.md", "hooks/forge_feed_forwards.md", "write-a-router.md", "write-an-optimizer.md"),
    *("replicas.md", "stores.md", "write-a-mirror.md", "write-a-mixer.md", "write-an-encoder.md"),
    *("chat.md", "freezing.md", "optimizers.md", "hooks/forge_data_sources.md", "hooks/forge_losses.md"),
    *("hooks/forge_callbacks.md", "hooks/forge_trackers.md"),
)
"""Pages for those who work on Forge itself, who have a checkout; and pages that few need, beside those of their
hooks: all wheels together have 2 MB. ``pages/library.py`` leaves the same ones out."""


class Pages(BuildHookInterface):
    """From a checkout, or from a source distribution, which has a copy. An editable installation reads the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        own, tree = root / "docs", root.parents[1] / "docs"
        folder = own if own.is_dir() else tree
        if not (folder / "hooks" / "index.md").is_file():
            raise FileNotFoundError(f"the pages of the documentation are neither in {own} nor in {tree}")
        if version == "editable":
            return
        files = [file for glob in ("*.md", "hooks/*.md", "how-to/*.md") for file in sorted(folder.glob(glob))]
        names = {file: file.relative_to(folder).as_posix() for file in files}
        pages = {name: file for file, name in names.items() if name not in LEFT_OUT}
        included = build_data["force_include"]
        if self.target_name == "sdist":
            included.update({str(page): f"docs/{name}" for name, page in pages.items()})
        else:
            self._archive().parent.mkdir(parents=True, exist_ok=True)
            self._archive().write_bytes(archive(pages))
            included[str(self._archive())] = ARCHIVE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._archive().unlink(missing_ok=True)

    def _archive(self) -> Path:
        return Path(self.directory) / "text.bz2"


def archive(pages: dict[str, Path]) -> bytes:
    """All in one, names and texts with zeros between, much smaller than each by itself; the same bytes for the same
    pages. bzip2 is best for text."""
    texts = [part for name, page in pages.items() for part in (name, page.read_text(encoding="utf-8"))]
    return bz2.compress("\0".join(texts).encode())
