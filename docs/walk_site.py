"""A reader with a browser: opens every page of a built site, and looks for what words are found by.

``python docs/walk_site.py docs/_build/html`` prints what it has found, and ends with 1 if anything is wrong. It is no
part of ``make docs``. It takes a browser and what drives it, in an environment of its own::

    pip install playwright axe-playwright-python
    playwright install chromium         # or --browser with the path of a Chromium that is there

Each page is opened at the widths of a desk and of a phone, light and dark: errors in the console, a page wider than its
window, and text with less contrast than WCAG 2 asks for (AA: 4.5, and 3 for large text). Some typical pages are given
to axe-core, whose rules the accessibility score of Lighthouse is made of.
"""

from __future__ import annotations

import argparse
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

WIDTHS = {"desk": 1280, "phone": 390}
SCHEMES = ("light", "dark")
WORDS = {
    "router": "router",
    "checkpoint": "checkpoints",
    "resume": "resume",
    "slurm": "slurm",
    "fsdp": "choose-a-layout",
    "tensor parallel": "choose-a-layout",
    "optimizer": "optimizer",
    "learning rate": "optimizer",
    "tokenizer": "tokenizer",
    "mixture": "mixture",
    "evaluation": "evaluat",
    "callback": "callback",
    "tracker": "tracker",
    "profile": "profile",
    "memory": "memory",
    "convert": "published-models",
    "plugin": "hooks/index",
    "completion": "command-line",
    "glossary": "glossary",
    "exit code": "running",
}
"""What a reader looks for, and a part of the address of a page that has to be among the first results."""
FIRST = 10
TYPICAL = (
    "index.html",
    "walk.html",
    "configuration.html",
    "generated/config-reference.html",
    "hooks/forge_routers.html",
)
"""Pages that axe-core looks at: a list, a text, tables, what is generated from code."""
RULES = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"],
    "rules": {"target-size": {"enabled": True}, "td-has-header": {"enabled": True}},
}
"""Those of WCAG, and two that Lighthouse asks for and axe-core leaves out by itself."""

CONTRAST = """() => {
  const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parse = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const over = (top, under) => top.slice(0, 3).map((c, i) => c * top[3] + under[i] * (1 - top[3]));
  const behind = node => {
    const layers = [];
    for (let one = node; one; one = one.parentElement) layers.push(parse(getComputedStyle(one).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const found = {};
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    const seen = node.checkVisibility({opacityProperty: true, visibilityProperty: true});
    if (!texts.currentNode.data.trim() || !seen) continue;
    const style = getComputedStyle(node), ground = behind(node);
    const [a, b] = [light(over(parse(style.color), ground)), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5) - 0.005) {
      const colours = `${style.color} on rgb(${ground.map(Math.round)})`;
      const key = `${[node.tagName.toLowerCase(), ...node.classList].join(".")} ${colours}`;
      found[key] ??= `${ratio.toFixed(2)} "${texts.currentNode.data.trim().slice(0, 30)}"`;
    }
  }
  return found;
}"""
OVERFLOW = """() => {
  const width = document.documentElement.clientWidth;
  const scrolls = node => node.tagName !== "ARTICLE" &&
    (["auto", "scroll"].includes(getComputedStyle(node).overflowX) || scrolls(node.parentElement));
  const wide = [...document.querySelectorAll("article *")]
    .filter(one => one.getBoundingClientRect().right > width + 1 && !scrolls(one.parentElement));
  const all = document.documentElement.scrollWidth;
  return all > width || wide.length ? `${all} of ${width}: ${wide[0]?.outerHTML.slice(0, 120) ?? "?"}` : "";
}"""
"""What is wider than the window, unless it stands in something that can be scrolled."""


def main() -> int:
    """Walk the site of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--browser", help="path of a Chromium; by default the one that playwright has installed")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each page, width and scheme")
    given = parser.parse_args()
    handler = functools.partial(_Quiet, directory=str(given.site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=given.browser)
        home = f"http://127.0.0.1:{server.server_port}"
        pages = sorted(path.relative_to(given.site).as_posix() for path in given.site.rglob("*.html"))
        found = [*_problems(browser, home, pages, given.pictures), *_not_found(browser, home)]
        server.shutdown()
    print(*found, f"{len(pages)} pages, {len(WORDS)} words, {len(found)} problems", sep="\n")
    return 1 if found else 0


class _Quiet(SimpleHTTPRequestHandler):
    """Serves the site, and says nothing of it: a browser leaves a page before all has come."""

    def handle(self) -> None:
        """Serve until the browser leaves."""
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def _problems(browser: Any, home: str, pages: list[str], pictures: Path | None) -> Iterator[str]:
    """A sentence for each error, overflow, broken rule and pale text; that of colours once in all."""
    pale: dict[str, str] = {}
    for scheme in SCHEMES:
        for device, width in WIDTHS.items():
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page = context.new_page()
            said: list[str] = []
            page.on("console", lambda one, said=said: said.append(_told(one)) if one.type == "error" else None)
            page.on("pageerror", lambda one, said=said: said.append(str(one)))
            for name in pages:
                page.goto(f"{home}/{name}")
                where = f"{name}, {device}, {scheme}"
                yield from (f"{where}: console: {text}" for text in said)
                said.clear()
                if wide := page.evaluate(OVERFLOW):
                    yield f"{where}: wider than the window: {wide}"
                for colours, example in page.evaluate(CONTRAST).items():
                    pale.setdefault(f"{scheme}: {colours}", f"contrast {example} in {name}, {device}")
                if name in TYPICAL:
                    broken = Axe().run(page, options=RULES).response["violations"]
                    yield from (f"{where}: {one['id']}: {one['nodes'][0]['html'][:120]}" for one in broken)
                if pictures is not None:
                    page.screenshot(path=pictures / f"{name.replace('/', '-')}.{device}.{scheme}.png")
            context.close()
    yield from (f"{colours}: {example}" for colours, example in sorted(pale.items()))


def _told(message: Any) -> str:
    return f"{message.text} {message.location['url']}"


def _not_found(browser: Any, home: str) -> Iterator[str]:
    """A sentence for each word whose page is not among the first results of the search."""
    page = browser.new_page()
    for word, wanted in WORDS.items():
        page.goto(f"{home}/search.html?q={word}")
        page.wait_for_function(
            "/finished|did not match/.test(document.querySelector('.search-summary')?.textContent ?? '')"
        )
        results = page.eval_on_selector_all("#search-results li a", "all => all.map(one => one.getAttribute('href'))")
        first = [link.partition("?")[0] for link in dict.fromkeys(results)][:FIRST]
        if not any(wanted in link for link in first):
            yield f"search {word!r}: no {wanted} among {', '.join(first) or 'nothing'}"


if __name__ == "__main__":
    sys.exit(main())
