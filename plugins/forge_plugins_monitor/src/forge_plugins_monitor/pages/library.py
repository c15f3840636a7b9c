"""Which pages there are, and where: in the wheel, or, where the package is installed editable, in the source tree."""

from __future__ import annotations

import bz2
import re
from collections.abc import Mapping
from pathlib import Path

import attrs

from forge_core.errors import ConfigError

PACKAGED = Path(__file__).parent / "text.bz2"
"""Made by ``hatch_build.py`` as the wheel is built."""
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
"""Pages for those who work on Forge itself, and pages that few need."""
SOURCES = Path(__file__).parents[5] / "docs"
"""In a checkout."""


@attrs.frozen
class Page:
    """One page, or a section of one."""

    name: str
    """What one types: ``"running"``, ``"forge_routers"``."""
    title: str
    file: Path
    """Within the documentation: ``running.md``, ``hooks/forge_routers.md``."""
    text: str
    """Markdown, as Sphinx reads it (MyST)."""


def pages() -> Mapping[str, Page]:
    """All of them by name; those of hooks and how-to pages last.

    Raises:
        ConfigError: the package was installed in a way that has left them out.
    """
    texts = _packaged() if PACKAGED.is_file() else _in_checkout()
    if "index.md" not in texts:
        raise ConfigError(f"this installation has no pages: neither {PACKAGED} nor {SOURCES} is there")
    found = [_page(Path(file), text) for file, text in texts.items()]
    return {page.name: page for page in found if page.name != "index"}


def _packaged() -> dict[str, str]:
    """The text of each page by its file, as in a checkout."""
    parts = bz2.decompress(PACKAGED.read_bytes()).decode().split("\0")
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _in_checkout() -> dict[str, str]:
    files = [file for glob in ("*.md", "hooks/*.md", "how-to/*.md") for file in sorted(SOURCES.glob(glob))]
    names = {file: file.relative_to(SOURCES).as_posix() for file in files}
    return {name: file.read_text(encoding="utf-8") for file, name in names.items() if name not in LEFT_OUT}


def sections(page: Page) -> Mapping[str, Page]:
    """The sections of a page, by their headings in the form of an anchor: ``"exit-codes"``."""
    found: dict[str, Page] = {}
    lines = _without_code(page.text)
    for index, line in enumerate(lines):
        heading = re.match(r"(##+) (.+)", line)
        if heading is None:
            continue
        title = heading[2].replace("`", "").strip()
        ends = (n for n in range(index + 1, len(lines)) if re.match(rf"#{{1,{len(heading[1])}}} ", lines[n]))
        text = "\n".join(page.text.splitlines()[index : next(ends, len(lines))])
        anchor = re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")
        found.setdefault(anchor, Page(f"{page.name}#{anchor}", title, page.file, f"{text}\n"))
    return found


def _page(file: Path, text: str) -> Page:
    title = re.search(r"^# (.+)$", text, re.M)
    return Page(file.stem, title[1].replace("`", "") if title else file.stem, file, text)


def _without_code(text: str) -> list[str]:
    """The lines, with those of code empty: a comment of a shell looks like a heading."""
    lines: list[str] = []
    fence = ""
    for line in text.splitlines():
        mark = re.match(r"\s*(```+|:::+)", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and fence and line.strip() == fence:
            fence = ""
        lines.append("" if fence or mark else line)
    return lines
